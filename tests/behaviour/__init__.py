"""Tests of what users see."""
