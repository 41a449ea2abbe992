"""The trainer: one process per device that trains its stage of the model.

It knows no one. It is told what to do by a :class:`trainer.contract.spec.RunSpec` and says how it
goes in the lines of :mod:`trainer.contract.progress`.
"""
