//! How long grants were waited for, as a histogram that travels between processes. Never clamps: a
//! wait too long to be recorded is an error, not a shorter wait.

use std::time::Duration;

use anyhow::anyhow;
use hdrhistogram::Histogram;

/// Significant digits kept.
const PRECISION: u8 = 3;

/// In µs, to three digits.
pub struct Waits(Histogram<u64>);

impl Waits {
    pub fn new() -> anyhow::Result<Waits> {
        Ok(Waits(
            Histogram::new(PRECISION).map_err(|error| anyhow!("{error}"))?,
        ))
    }

    pub fn record(&mut self, wait: Duration) -> anyhow::Result<()> {
        // Not `saturating_record`: that clamps instead of growing the histogram's range.
        Ok(self.0.record(wait.as_micros().try_into()?)?)
    }

    pub fn add(&mut self, other: &Waits) -> anyhow::Result<()> {
        Ok(self.0.add(&other.0)?)
    }

    pub fn times(&self) -> u64 {
        self.0.len()
    }

    /// `None` when nothing was waited for.
    pub fn quantile(&self, quantile: f64) -> Option<Duration> {
        let wait = Duration::from_micros(self.0.value_at_quantile(quantile));
        (!self.0.is_empty()).then_some(wait)
    }

    /// `None` when nothing was waited for.
    pub fn mean(&self) -> Option<Duration> {
        let mean = Duration::from_secs_f64(self.0.mean() / 1e6);
        (!self.0.is_empty()).then_some(mean)
    }

    /// As a message holds it: µs, how often.
    pub fn to_steps(&self) -> Vec<(u64, u64)> {
        let steps = self.0.iter_recorded();
        steps
            .map(|step| (step.value_iterated_to(), step.count_at_value()))
            .collect()
    }

    pub fn from_steps(steps: &[(u64, u64)]) -> anyhow::Result<Waits> {
        let mut waits = Waits::new()?;
        for &(wait, times) in steps {
            waits.0.record_n(wait, times)?;
        }
        Ok(waits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(found: Option<Duration>, wanted: Duration) -> bool {
        found.is_some_and(|found| found.abs_diff(wanted) <= wanted / 500)
    }

    #[test]
    fn long_waits_are_kept_at_their_length_also_on_the_way_to_another_process() -> anyhow::Result<()>
    {
        let (short, long) = (Duration::from_micros(90), Duration::from_secs(7));
        let mut thread = Waits::new()?;
        (0..98).try_for_each(|_| thread.record(short))?;
        (0..2).try_for_each(|_| thread.record(long))?;
        let mut process = Waits::new()?;
        process.add(&thread)?;
        let parent = Waits::from_steps(&process.to_steps())?;

        assert_eq!(parent.times(), 100);
        assert!(
            close(parent.quantile(0.5), short),
            "{:?}",
            parent.quantile(0.5)
        );
        assert!(
            close(parent.quantile(0.99), long),
            "{:?}",
            parent.quantile(0.99)
        );
        assert!(
            close(parent.quantile(1.0), long),
            "{:?}",
            parent.quantile(1.0)
        );
        Ok(())
    }

    #[test]
    fn without_a_wait_there_is_no_quantile() -> anyhow::Result<()> {
        assert_eq!(Waits::new()?.quantile(0.5), None);
        Ok(())
    }
}
