"""Data that lessons train on: real, small, offline unless a lesson says otherwise, and saying where it comes from."""

from __future__ import annotations

from .handwritten import Digits, digits

__all__ = ["Digits", "digits"]
