"""Pretrained models and where to adapt them."""
