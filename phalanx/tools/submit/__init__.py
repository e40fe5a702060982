"""Hand a run to a cluster: Slurm, Kubernetes, Kubeflow, JobSet, Ray, docker-compose or plain ssh. No torch."""
