"""What benchmarks/run.py measures: the training step, the loader, checkpoints and the start, each beside its peers.

Only ratios within one run are worth quoting. So all contenders of a part take turns, round by round, and a figure is
the median over the rounds. Every part gives a dict, or a larger one each time that more is measured, that may hold
    ratios   more is better: `--compare` names those that fell
    costs    less is better: `--compare` names those that rose
and what a reader needs to judge them. Do not compare the seconds with those of another run.

The part `scaling` has no peers: it counts and times what more ranks cost (count_collectives.py).

launch/gpu_proof.sh also runs checks, which pass or fail: gpu_proof.py says what the machine is and runs the GPU tests,
proof.py has the checks of training, and proof_report.py writes down all results.
"""
