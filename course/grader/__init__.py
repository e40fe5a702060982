"""The graders of the course: they start real ranks on a learner's file and say what is wrong with the result."""
