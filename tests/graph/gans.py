"""A generator and a critic with an optimizer each, in one ``train_step``."""

from __future__ import annotations

import tensorflow as tf

from tests.zoo import keras


def network(last):
    hidden = [keras.layers.Dense(9, activation="tanh"), keras.layers.Dense(8, activation="tanh")]
    return keras.Sequential([keras.Input((7,)), *hidden, keras.layers.Dense(last)])


class Gan(keras.Model):
    """Adam for the generator, momentum for the critic."""

    def __init__(self):
        super().__init__()
        self.generator, self.critic = network(7), network(1)
        self.entropy = keras.losses.BinaryCrossentropy(from_logits=True)

    def compile(self):
        super().compile(jit_compile=False)
        self.of_generator = keras.optimizers.Adam(0.01)
        self.of_critic = keras.optimizers.SGD(0.1, momentum=0.9)
        self.of_generator.build(self.generator.trainable_variables)
        self.of_critic.build(self.critic.trainable_variables)

    def call(self, x):
        return self.critic(self.generator(x))

    def critic_loss(self, right, wrong):
        return self.entropy(tf.ones_like(right), right) + self.entropy(tf.zeros_like(wrong), wrong)

    def train_step(self, data):
        real = data[0] if isinstance(data, tuple) else data
        with tf.GradientTape(persistent=True) as tape:
            wrong, right = self.critic(self.generator(real)), self.critic(real)
            fooled = self.entropy(tf.ones_like(wrong), wrong)
            found_out = self.critic_loss(right, wrong)
        of_critic, of_generator = self.critic.trainable_variables, self.generator.trainable_variables
        gradients = tape.gradient(found_out, of_critic), tape.gradient(fooled, of_generator)
        self.of_critic.apply(gradients[0], of_critic)
        self.of_generator.apply(gradients[1], of_generator)
        return {"generator": fooled, "critic": found_out}


class InTurns(Gan):
    """The critic is updated, ``times``, then the generator by what the critic says now."""

    times = 1

    def compile(self):
        super().compile()
        self.of_both = [keras.metrics.Mean(name=name) for name in ("critic", "generator")]

    @property
    def metrics(self):
        return self.of_both

    def noise(self, real, first):
        """Return what the generator is given."""
        return real

    def after_update(self):
        """Do what else is done with the critic then."""

    def train_step(self, data):
        real = data[0] if isinstance(data, tuple) else data
        of_critic, of_generator = self.critic.trainable_variables, self.generator.trainable_variables
        for _ in range(self.times):
            with tf.GradientTape() as tape:
                fake = self.generator(self.noise(real, True))
                loss = self.critic_loss(self.critic(real), self.critic(fake))
            self.of_critic.apply(tape.gradient(loss, of_critic), of_critic)
            self.after_update()
        self.of_both[0].update_state(loss)
        with tf.GradientTape() as tape:
            answer = self.critic(self.generator(self.noise(real, False)))
            loss = self.entropy(tf.ones_like(answer), answer)
        self.of_generator.apply_gradients(zip(tape.gradient(loss, of_generator), of_generator, strict=True))
        self.of_both[1].update_state(loss)
        return {metric.name: metric.result() for metric in self.of_both}


class CriticTwice(InTurns):
    """Updates several times by one optimizer, as Wasserstein GANs do."""

    times = 2


class Noise(InTurns):
    """Random numbers of both kinds: of a kernel's state, and of a seed in a variable."""

    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(4)

    def noise(self, real, first):
        return (
            tf.random.normal(tf.shape(real)) if first else keras.random.normal(tf.shape(real), seed=self.seed)
        )


class LooksAgain(InTurns):
    """Its logs are those of all updated weights."""

    def train_step(self, data):
        logs = super().train_step(data)
        return logs | {"answer": tf.reduce_mean(self(data[0]))}


class Averaged(CriticTwice):
    """Clips the critic's weights after each update, and keeps a moving average of the generator's."""

    def compile(self):
        super().compile()
        self.means = [keras.Variable(tf.zeros(v.shape)) for v in self.generator.trainable_variables]

    def after_update(self):
        for variable in self.critic.trainable_variables:
            variable.assign(tf.clip_by_value(variable, -0.2, 0.2))

    def train_step(self, data):
        logs = super().train_step(data)
        for mean, variable in zip(self.means, self.generator.trainable_variables, strict=True):
            mean.assign(0.9 * mean + 0.1 * variable)
        return logs


class CalledCritic(InTurns):
    """Its critic is called in a ``tf.function``."""

    def compile(self):
        super().compile()
        critic = self.critic

        class Called:
            trainable_variables = critic.trainable_variables
            __call__ = staticmethod(tf.function(critic))

        object.__setattr__(self, "critic", Called())


class Penalty(CriticTwice):
    """The critic's loss has the gradient of its answers in it (Gulrajani et al. 2017)."""

    def compile(self):
        super().compile()
        self.of_critic = keras.optimizers.Adam(0.001)
        self.of_critic.build(self.critic.trainable_variables)

    def train_step(self, data):
        real, losses = data[0], []
        of_critic, of_generator = self.critic.trainable_variables, self.generator.trainable_variables
        for _ in range(self.times):
            with tf.GradientTape() as tape:
                fake = self.generator(0.5 * real)
                between = real + 0.3 * (fake - real)
                with tf.GradientTape() as inner:
                    inner.watch(between)
                    answers = self.critic(between)
                slopes = tf.norm(inner.gradient(answers, between), axis=1)
                loss = tf.reduce_mean(self.critic(fake)) - tf.reduce_mean(self.critic(real))
                loss += 10.0 * tf.reduce_mean((slopes - 1.0) ** 2)
            gradients = tape.gradient(loss, of_critic)
            self.of_critic.apply_gradients(zip(gradients, of_critic, strict=True))
            losses.append(loss)
        with tf.GradientTape() as tape:
            loss = -tf.reduce_mean(self.critic(self.generator(0.5 * real)))
        gradients = tape.gradient(loss, of_generator)
        self.of_generator.apply_gradients(zip(gradients, of_generator, strict=True))
        return {"critic": losses[-1], "generator": loss}
