"""Train a model: `python train.py --config dense-dp2`."""

import sys
from collections.abc import Sequence

from configs import RUNS
from glm5fn import mesh
from glm5fn.command import again, parse, refuse
from glm5fn.launch import end_with_launcher, launch, launched, restarts
from glm5fn.plan import plan
from glm5fn.run import train
from glm5fn.typed import ConfigError


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 done, 2 a command that cannot be run, 1 anything else."""
    try:
        command = parse(argv, RUNS)
        if command.plan:
            print(plan(command.run))
            return 0
        if restarts():
            command = again(command)
        refuse(command)
        if not launched() and (command.run.mesh.world > 1 or command.max_restarts):
            return launch(__file__, argv, command.run.mesh.world, command.max_restarts)
        if launched():
            end_with_launcher()
            mesh.start(command.run.device, restarts())
        ended = train(command.run, command.directory, resume=command.resume, init=command.init, export=command.export)
    except ConfigError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    except mesh.RunError as error:
        if mesh.rank() == 0:
            print(f"train.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("train.py: interrupted before it could save", file=sys.stderr)
        return 1
    finally:
        mesh.stop()
    return 0 if ended else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
