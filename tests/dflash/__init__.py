"""Tests of examples/dflash."""
