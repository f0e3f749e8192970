"""The README's Python examples run as printed."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def run_block(block: str, directory: Path, changes: dict[str, str]) -> dict:
    for old, new in ({"model_dir": str(directory)} | changes).items():
        block = block.replace(old, new)
    names: dict = {}
    exec(compile(block, "README.md", "exec"), names)
    return names


def test_the_api_example_generates(tiny_directory):
    changes = {'gpu_memory="16GiB"': "expert_slots=40", "max_new_tokens=64": "max_new_tokens=8"}
    names = run_block(BLOCKS[0], tiny_directory, changes | {'depth="auto"': "depth=4"})
    assert len(names["result"].tokens[0]) == 8
    assert names["result"].stats.new_tokens == 8


def test_the_own_loop_decodes_what_generate_does(tiny_directory):
    names = run_block(BLOCKS[1], tiny_directory, {"< 32": "< 12"})
    sj, model, output = names["sj"], names["model"], names["output"]
    expected = sj.generate(model, [names["prompt"][0]], max_new_tokens=12, depth=0)
    assert output[:12] == expected.tokens[0]


def test_there_are_no_other_examples():
    assert len(BLOCKS) == 2, "give each new example a test of its own"


@pytest.mark.parametrize("name", ["scripts/demo.sh", "scripts/test.sh", "convert/FORMAT.md"])
def test_files_that_the_readme_names_exist(name):
    assert name in README.read_text()
    assert (README.parent / name).is_file()
