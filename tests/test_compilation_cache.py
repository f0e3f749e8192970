"""Where compiled programs are kept."""

import jax
import pytest

from specter_jax.compilation import keep_compiled_programs
from specter_jax.paths import cache_root


@pytest.fixture
def unset_cache(monkeypatch, tmp_path):
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.setenv("SPECTER_CACHE", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", None)
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)


def test_an_unset_cache_goes_under_the_package_s_own(unset_cache):
    keep_compiled_programs()
    assert jax.config.jax_compilation_cache_dir == str(unset_cache / "compiled")
    assert cache_root() == unset_cache


def test_a_cache_of_the_user_s_is_left_alone(unset_cache):
    jax.config.update("jax_compilation_cache_dir", "elsewhere")
    keep_compiled_programs()
    assert jax.config.jax_compilation_cache_dir == "elsewhere"


def test_without_a_home_nothing_is_kept_and_nothing_fails(unset_cache, monkeypatch):
    def no_home():
        raise RuntimeError("no home")

    monkeypatch.delenv("SPECTER_CACHE")
    monkeypatch.setattr("pathlib.Path.home", no_home)
    keep_compiled_programs()
    assert jax.config.jax_compilation_cache_dir is None
