"""Tests of graphsafe."""
