"""What launch/doctor.py checks before a long run, on the ranks and places of the run itself.

checkup     which checks there are, and the report
machines    versions, devices, drivers and clocks of every rank
places      the folder for checkpoints, the shards and the loader
training    the chosen engine's gradients beside one process's, a few steps of the whole recipe, and the collectives
"""
