"""The exit codes of commands, and their error messages, which name the remedy.

0; 1 if a request failed; 2 for bad arguments, settings or checkpoints, with one line on
standard error that names the thing and the remedy; 3 if the engine, which must not,
raised in a replay or a simulation; 130 after an interrupt.
"""

import os
import sys
from collections.abc import Callable
from typing import Final

from minfer.effects.models.config_reader import CheckpointError
from minfer.journal.format import JournalError
from minfer.journal.turns import EngineRaisedError
from minfer.records.request import ParameterError
from minfer.values.checks import ConfigError

BAD_INPUT: Final = 2
ENGINE_RAISED: Final = 3
INTERRUPTED: Final = 130  # 128 and SIGINT, as a shell counts
READER_LEFT: Final = 141  # 128 and SIGPIPE


def guarded(run: Callable[[], int]) -> int:
    """Run; returns the exit code, also of an error that the user can mend. Raises other
    errors.
    """
    try:
        code = run()
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except EngineRaisedError as error:
        print(f"minfer: {error}", file=sys.stderr)
        return ENGINE_RAISED
    except BrokenPipeError:
        # The reader of the output has gone. Python would complain in its flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_LEFT
    except ValueError as error:
        if not isinstance(error, _users_errors()):
            raise
        print(f"minfer: {error}", file=sys.stderr)
        return BAD_INPUT
    return code


def _users_errors() -> tuple[type[ValueError], ...]:
    """Errors whose messages describe a wrong input."""
    from minfer.effects.live.input_processing.input_processor import RequestError
    from minfer.effects.text.chat_templates import ChatTemplateError

    return (
        ConfigError,
        RequestError,
        CheckpointError,
        ParameterError,
        ChatTemplateError,
        JournalError,
    )
