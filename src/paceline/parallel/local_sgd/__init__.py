"""LocalSGD, DiLoCo and SlowMo: parameters synchronised every H steps."""
