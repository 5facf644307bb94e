"""Defences against false uploads."""
