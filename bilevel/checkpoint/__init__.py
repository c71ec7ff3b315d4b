"""Files from which a run goes on: written whole or not at all, and read only if they are what was written."""

from bilevel.checkpoint.errors import CheckpointError, CheckpointWarning
from bilevel.checkpoint.file import load, save
from bilevel.checkpoint.layout import check_form, describe
from bilevel.checkpoint.store import Store, newest

__all__ = ["CheckpointError", "CheckpointWarning", "Store", "check_form", "describe", "load", "newest", "save"]
