"""`python -m glm5fn COMMAND`: what is done with runs and models besides training them."""

import sys
from collections.abc import Callable, Sequence

from tyro.extras import subcommand_cli_from_dict

from . import mesh
from .compare import compare
from .complete import complete
from .evaluate import evaluate
from .inference import Job, run
from .inspect_data import inspect_data
from .prepare import prepare
from .typed import ConfigError

COMMANDS: dict[str, Callable[..., int | Job]] = {
    "compare": compare,
    "evaluate": evaluate,
    "generate": complete,
    "prepare": prepare,
    "inspect-data": inspect_data,
}


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 done, 2 a command that cannot be run, 1 anything else."""
    try:
        done = subcommand_cli_from_dict(COMMANDS, prog="python -m glm5fn", args=argv)
        return run(done, argv) if isinstance(done, Job) else done
    except ConfigError as error:
        print(f"glm5fn: {error}", file=sys.stderr)
        return 2
    except mesh.RunError as error:
        if mesh.rank() == 0:
            print(f"glm5fn: {error}", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(f"glm5fn: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("glm5fn: interrupted; the same call goes on where it can", file=sys.stderr)
        return 1
    finally:
        mesh.stop()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
