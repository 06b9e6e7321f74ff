"""Trains DFlash drafters for speculative decoding, with target threads and drafter threads of one process.

``python -m examples.dflash --help`` lists the commands. README.md beside this file has the picture.
"""
