"""What launch/benchmark.py measures: the training step, the loader, checkpoints and the start, each beside its peers.

Only ratios within one run are worth quoting, so all contenders of a part take turns, round by round, and a figure is
the median over the rounds. Every part gives a dict that may hold
    ratios   more is better: `--compare` names what fell
    costs    less is better: `--compare` names what rose
and whatever else a reader needs to judge them. Absolute seconds are there to be read, not to be compared.
"""
