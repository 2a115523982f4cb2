"""Start a two-node Ray cluster here and print its address; remove a node at the first input line, end at the next."""

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
