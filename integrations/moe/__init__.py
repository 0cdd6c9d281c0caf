"""Mixture-of-Experts: the router, the dispatcher, the experts, and the layer made of them."""
