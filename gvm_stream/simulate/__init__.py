"""`gvm-stream simulate`: what a policy would save, in a made-up world whose acceptance rates and energies are known."""
