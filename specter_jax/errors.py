"""Typed errors: one line each that says what came, what was expected and what to do next."""


class SpecterError(Exception):
    """Base of all errors this package raises on purpose (exit code 2 on the command line)."""


class InvalidRequestError(SpecterError, ValueError):
    """A caller's argument is out of range or contradicts another one."""


class UnknownPolicyError(InvalidRequestError):
    """The named prefetch policy does not exist."""


class PromptError(InvalidRequestError):
    """A prompt is empty, malformed, or longer than the model's context."""


class BudgetError(InvalidRequestError):
    """The memory budget or slot count cannot hold what the model needs at least."""


class CacheFullError(BudgetError):
    """Every slot of the expert cache is pinned; more slots or a smaller step is needed."""


class UnsupportedModelError(SpecterError, ValueError):
    """A checkpoint's family or one of its options is not supported; names the config field."""


class ConversionError(SpecterError):
    """A source checkpoint is damaged or incomplete; names the file or tensor."""


class CheckpointError(SpecterError):
    """A converted checkpoint cannot be used; names the file or field."""


class FormatVersionError(CheckpointError):
    """The converted checkpoint was written in another version of the format."""


class ChecksumError(CheckpointError):
    """A file of the converted checkpoint does not have the recorded size or checksum."""


class MissingFileError(CheckpointError):
    """A file of the converted checkpoint is absent."""
