"""A process that trains; see test_training_processes.py. It prints the losses of all steps, in hexadecimal."""

import json
import pathlib
import sys

import jax

from models import data, train, training


def main(options: dict) -> None:
    processes = options["processes"]
    jax.config.update("jax_num_cpu_devices", options["devices"] // processes)
    if processes > 1:
        jax.distributed.initialize(f"127.0.0.1:{options['port']}", processes, options["process"])
    recipe = training.Recipe(steps=options["steps"], batch=8, length=16)
    path = pathlib.Path(options["output"])
    mesh = train.make_mesh((1, options["devices"], 1))
    with jax.set_mesh(mesh), training.Checkpoints(path, options["every"]) as checkpoints:
        trainer = training.Trainer(train.CONFIGS["tiny"], recipe, data.load())
        if options["resume"]:
            checkpoints.restore(trainer)
            print(f"resumed after {len(trainer.history.losses)}", flush=True)
        trainer.train(checkpoints, report=False)
    print("losses", *(loss.hex() for loss in trainer.history.losses), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
