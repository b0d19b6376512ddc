"""What a scheduling policy of your own needs: the protocol, the load that it may look at,
and first come, first served, which it may inherit from.

The policies that come with minfer are in `minfer.policies`.
"""

from minfer.records.policy import FirstCome as FirstCome
from minfer.records.policy import Load as Load
from minfer.records.policy import Policy as Policy
from minfer.records.policy import Rank as Rank
