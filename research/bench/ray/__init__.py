"""Ray on this machine: a batch on a cluster, and replicas of the server, while some are killed."""
