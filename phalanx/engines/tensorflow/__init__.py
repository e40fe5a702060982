"""TensorFlow: Keras models on replicas, workers or parameter servers, trained by Keras."""
