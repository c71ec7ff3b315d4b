"""What can go wrong with a file."""


class CheckpointError(ValueError):
    """A checkpoint cannot be used: it is damaged, foreign, of another run, in use, or cannot be written.

    Example:
        >>> import tempfile, pathlib
        >>> from bilevel.checkpoint import load
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "run.pt"
        >>> _ = path.write_bytes(b"hello")
        >>> try:
        ...     load(path)
        ... except CheckpointError as error:
        ...     print(str(error).replace(str(path), "run.pt"))
        checkpoint: run.pt was not written by bilevel; choose another name, or remove it.
    """


class CheckpointWarning(UserWarning):
    """A checkpoint or a log could not be written or read, and the run goes on without it.

    Example:
        >>> import warnings
        >>> warnings.simplefilter("error", CheckpointWarning)  # to end a run instead
        >>> warnings.simplefilter("default", CheckpointWarning)
    """
