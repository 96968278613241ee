//! Causeway in the cluster.
