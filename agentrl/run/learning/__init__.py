"""The learner's process as one trio program: the training loop and its parts. `learner_loop` is the place to begin."""
