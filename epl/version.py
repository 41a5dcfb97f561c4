"""The version of EPL; setup.py reads it from this file's text, without importing the package."""

VERSION = "1.0.0.dev0"
