# SPDX-License-Identifier: Apache-2.0
"""The exception tree: every class is also the builtin a caller would catch; names travel on the wire."""

from __future__ import annotations


class TransferQueueError(Exception):
    """Base of everything this package raises on purpose."""

    def __str__(self) -> str:
        # KeyError.__str__ would show the repr of the text; ours are sentences.
        return str(self.args[0]) if self.args else ""


class NotInitializedError(TransferQueueError, AssertionError, RuntimeError):
    """The process has no client yet: call ``init()`` first."""


class InvalidRequestError(TransferQueueError, ValueError, RuntimeError):
    """The request can't be right whatever the state of the queue: a bad size, rank, name or count."""


class UnknownPartitionError(InvalidRequestError):
    """No such partition."""


class UnknownFieldError(InvalidRequestError):
    """No such field in this partition; the text names those that exist."""


class SchemaConflictError(InvalidRequestError):
    """A field's dtype differs from what the partition already holds; the text names both."""


class SamplerError(InvalidRequestError):
    """A sampler can't be built, isn't allowed, or refused its input."""


class SampleClearedError(TransferQueueError, KeyError, RuntimeError):
    """The metadata names samples that have been cleared."""


class StorageKeyNotFoundError(SampleClearedError):
    """The storage holds no value for this sample and field."""


class FieldNotReadyError(TransferQueueError, RuntimeError):
    """A field was asked for that some of the samples don't have yet."""


class BatchTimeoutError(TransferQueueError, TimeoutError, RuntimeError):
    """No batch came together before the deadline; the text says what was missing."""


class EndOfPartitionError(TransferQueueError, EOFError):
    """The stream has ended: sealed and handed out, or cleared. Not the same as "nothing yet"."""


class ProducersGoneError(TransferQueueError, RuntimeError):
    """Every producer of what a consumer waits for has died, so waiting on would never end."""


class StorageFullError(TransferQueueError, TimeoutError, ValueError, RuntimeError):
    """Storage capacity exceeded, and nothing was cleared before the deadline."""


class UnsupportedValueError(TransferQueueError, TypeError, ValueError):
    """A value that can't be stored as configured; the text names the type and the switch."""


class QueueUnreachableError(TransferQueueError, ConnectionError, TimeoutError, RuntimeError):
    """The controller or a storage unit doesn't answer: wrong address, or it is gone."""


class CheckpointError(TransferQueueError, ValueError, RuntimeError):
    """A checkpoint could not be written, or what lies there is none that can be restored here."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """No checkpoint there, or a file of it is missing; the text names it."""


class ProtocolError(TransferQueueError, RuntimeError):
    """A message that the other side couldn't decode or didn't expect."""


class ConfigError(TransferQueueError, ValueError):
    """The configuration has an unknown key or an impossible value."""


class LaunchError(TransferQueueError, RuntimeError):
    """A server process did not start; the text carries what it printed."""


class ClosedError(TransferQueueError, RuntimeError):
    """This client was closed."""


class RemoteError(TransferQueueError, RuntimeError):
    """An error of ours inside a server: please report it with the text."""


def _tree(cls: type[TransferQueueError]) -> list[type[TransferQueueError]]:
    return [cls, *(sub for child in cls.__subclasses__() for sub in _tree(child))]


def to_wire(error: BaseException) -> tuple[str, str]:
    """(code, text) of an error as it travels: ours by class name, plain bad input as such, the rest as RemoteError."""
    if isinstance(error, TransferQueueError):
        return type(error).__name__, str(error)
    if isinstance(error, (ValueError, TypeError)):
        return InvalidRequestError.__name__, str(error)
    return RemoteError.__name__, f"{type(error).__name__}: {error}"


def from_wire(code: str, text: str) -> TransferQueueError:
    """The error that ``to_wire`` described; an unknown code (a newer server) becomes RemoteError."""
    by_name = {cls.__name__: cls for cls in _tree(TransferQueueError)}
    return by_name.get(code, RemoteError)(text)
