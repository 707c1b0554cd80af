//! How long threads waited for locks, as a histogram that travels between processes. A wait that is too long for the
//! histogram is an error.

use std::time::Duration;

use anyhow::anyhow;
use hdrhistogram::Histogram;

/// Significant digits kept.
const PRECISION: u8 = 3;

/// A histogram of times in ns, with three significant digits.
pub struct Waits(Histogram<u64>);

impl Waits {
    /// An empty histogram.
    ///
    /// # Errors
    /// None in practice.
    pub fn new() -> anyhow::Result<Self> {
        let histogram = Histogram::new(PRECISION).map_err(|error| anyhow!("{error}"))?;
        Ok(Self(histogram))
    }

    /// Adds one wait.
    ///
    /// # Errors
    /// The histogram cannot grow that far.
    pub fn record(&mut self, wait: Duration) -> anyhow::Result<()> {
        // `record` grows the histogram's range; `saturating_record` would clamp the value.
        Ok(self.0.record(wait.as_nanos().try_into()?)?)
    }

    /// Adds the waits of a message: (ns, count).
    ///
    /// # Errors
    /// The errors of [`record`](Self::record).
    pub fn add(&mut self, steps: &[(u64, u64)]) -> anyhow::Result<()> {
        for &(wait, times) in steps {
            self.0.record_n(wait, times)?;
        }
        Ok(())
    }

    /// Adds all waits of another histogram.
    ///
    /// # Errors
    /// The errors of [`record`](Self::record).
    pub fn merge(&mut self, other: &Self) -> anyhow::Result<()> {
        Ok(self.0.add(&other.0)?)
    }

    /// The number of waits.
    pub fn times(&self) -> u64 {
        self.0.len()
    }

    /// The quantile; `None` without a wait.
    pub fn quantile(&self, quantile: f64) -> Option<Duration> {
        let wait = Duration::from_nanos(self.0.value_at_quantile(quantile));
        (!self.0.is_empty()).then_some(wait)
    }

    /// The mean; `None` without a wait.
    pub fn mean(&self) -> Option<Duration> {
        let mean = Duration::from_secs_f64(self.0.mean() / 1e9);
        (!self.0.is_empty()).then_some(mean)
    }

    /// The waits as in a message: (ns, count).
    pub fn to_steps(&self) -> Vec<(u64, u64)> {
        let steps = self.0.iter_recorded();
        steps
            .map(|step| (step.value_iterated_to(), step.count_at_value()))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_waits_keep_their_length_between_processes() -> anyhow::Result<()> {
        let (short, long) = (Duration::from_micros(90), Duration::from_secs(7));
        let mut thread = Waits::new()?;
        (0..98).try_for_each(|_| thread.record(short))?;
        (0..2).try_for_each(|_| thread.record(long))?;
        let mut process = Waits::new()?;
        process.merge(&thread)?;
        let mut parent = Waits::new()?;
        parent.add(&process.to_steps())?;

        assert_eq!(parent.times(), 100);
        let mean = (98 * short + 2 * long) / 100;
        for (found, wanted) in [
            (parent.quantile(0.5), short),
            (parent.quantile(0.99), long),
            (parent.quantile(1.0), long),
            (parent.mean(), mean),
        ] {
            let close = |found: Duration| found.abs_diff(wanted) <= wanted / 500;
            assert!(found.is_some_and(close), "{found:?} for {wanted:?}");
        }
        Ok(())
    }

    #[test]
    fn quantiles_and_means_need_a_wait() -> anyhow::Result<()> {
        let none = Waits::new()?;
        assert_eq!((none.quantile(0.5), none.mean()), (None, None));
        Ok(())
    }
}
