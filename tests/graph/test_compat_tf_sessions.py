"""Sessions that are not closed: what an upgrade breaks."""

from __future__ import annotations

from unittest import mock

import tensorflow as tf

from tf_ooo.compat import tf_functions


def test_abandon():
    with mock.patch("tensorflow.python.client.session.tf_session.TF_CloseSession") as close:
        session = tf.compat.v1.Session(graph=tf.Graph())
        tf_functions.abandon(session)
        del session
        assert not close.called, "Session._closed: the end of a session waits for a worker that is lost"
        tf.compat.v1.Session(graph=tf.Graph()).close()
        assert close.called
