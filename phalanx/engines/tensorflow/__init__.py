"""TensorFlow behind the trainers' face: Keras brings the loop; the config, events, history and launcher are ours."""
