//! The progress of a command: a bar on standard error, only if that is a terminal. Measures nothing.

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use crate::stop::Stop;

/// How often a bar is redrawn.
const TICK: Duration = Duration::from_millis(100);

/// A bar with `words` behind it, in indicatif's template language.
pub fn bar(length: u64, words: &str) -> anyhow::Result<ProgressBar> {
    let style = ProgressStyle::with_template(&format!("   {{bar:40}} {words}"))?;
    Ok(ProgressBar::new(length).with_style(style))
}

/// A bar of a time, in ms.
pub fn bar_of_time(time: Duration, words: &str) -> anyhow::Result<ProgressBar> {
    bar(time.as_millis().try_into()?, words)
}

/// Waits for `time` while a bar of time advances; calls `message` if the bar is visible.
pub fn pass(
    time: Duration,
    bar: &ProgressBar,
    stop: &Stop,
    message: impl Fn() -> anyhow::Result<String>,
) -> anyhow::Result<()> {
    let (start, before) = (Instant::now(), bar.position());
    while let Some(rest) = time.checked_sub(start.elapsed()) {
        stop.pause(rest.min(TICK))?;
        if !bar.is_hidden() {
            bar.set_message(message()?);
        }
        let passed = start.elapsed().min(time);
        bar.set_position(before + passed.as_millis() as u64);
    }
    Ok(())
}
