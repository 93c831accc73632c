"""A stock fairchem training job, rewritten for janus.

text.py    changes a YAML file key by key and leaves all else as it was, to the byte
layout.py  how many ranks, replicas and micro-batches the job gets
job.py     composes the job and checks that it can be converted
convert.py all of it together
"""
