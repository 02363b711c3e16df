"""A layer or a model on several processes, of one machine or of many. docs/several-machines.md says how.

Communicators are imported by themselves: ktmoe.distributed.gloo needs torch, ktmoe.distributed.mpi needs mpi4py.
"""

from ktmoe.distributed.communicator import Alone, Communicator
from ktmoe.distributed.division import Division
from ktmoe.distributed.layer import DistributedLayer, Distribution
from ktmoe.distributed.together import together

__all__ = ["Alone", "Communicator", "DistributedLayer", "Distribution", "Division", "together"]
