"""Start a two-node Ray cluster on this machine and print its address.

The first line of input removes a node, and the second line, or the end of the input, ends the cluster.
"""

import sys

from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
second = cluster.add_node(num_cpus=1)
cluster.wait_for_nodes()
print(cluster.address, flush=True)
if sys.stdin.readline():
    cluster.remove_node(second, allow_graceful=False)
    print("one node left", flush=True)
    sys.stdin.readline()
cluster.shutdown()
