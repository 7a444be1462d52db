"""The health of a run: what goes wrong in it, by which figures, and what to type.

    run_facts         reads a run's store, and only looks: plain data of its last steps and episodes
    advice            what a check answers
    weight_checks     do engines sample from the learner's weights
    learning_checks   gradients, learning rate, entropy, distances
    reward_checks     is there a signal, and does the policy earn it honestly
    episode_checks    what ends episodes, tools, machines that fail
    flow_checks       who waits for whom, what is lost on the way, evaluations, the disk
    examine           all checks, and which advice explains another

A check is a function of `RunFacts` alone. It judges the last `RECENT` steps, by shares and ratios: no threshold depends
on how fast a machine is.
"""
