"""Data that lessons train on: real, small, offline unless a lesson says otherwise, and saying where it comes from."""

from __future__ import annotations

from .handwritten import Digits, digits
from .mnist_files import mnist, mnist_or_digits

__all__ = ["Digits", "digits", "mnist", "mnist_or_digits"]
