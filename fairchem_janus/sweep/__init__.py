"""Sweeps: many variants of one job file, each run through the fairchem command line in a run folder of its own.

expand.py   Hydra's sweep syntax -> the overrides of every member
compose.py  whether fairchem can compose a member's configuration
state.py    what became of a member, from the files in its run folder
launch.py   members as processes, a few at a time
"""
