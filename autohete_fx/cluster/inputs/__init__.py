"""Clusters and costs that are not measured here: descriptions of users, published measurements, data sheets."""
