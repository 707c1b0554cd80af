//! The driver of all soaks: plays one round after another on a topology, until the time is up or a promise is broken,
//! and prints the findings. Knows neither servers nor faults.

use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use leasehold_tools::progress;
use leasehold_tools::stop::{Finding, Stop, Stopped};

use crate::faults::Kind;
use crate::inject::Defect;

/// The servers of a soak, with the work on them, their faults, and the checks of both.
pub trait Topology {
    /// Plays one round: clients work while faults happen. After Ctrl-C, the round ends as usual, but earlier.
    fn play(&mut self, round: &Round<'_>) -> anyhow::Result<Findings>;

    /// The shortest and the longest round. A shorter one shows too little.
    fn round_times(&self) -> (Duration, Duration);

    /// Ends the work after the last round.
    fn finish(&mut self) -> anyhow::Result<Findings> {
        Ok(Findings::default())
    }

    /// Describes the work of all rounds. The driver prints the seed after this text.
    fn text(&self) -> String;

    /// Fails if the soak used too little of its subject, so that a result without violations shows nothing.
    fn check_use(&self) -> anyhow::Result<()> {
        Ok(())
    }
}

/// The settings of a soak, which its topology plays.
pub struct Round<'a> {
    pub number: u64,
    pub time: Duration,
    pub soak: &'a Soak<'a>,
    /// Shows a text beside the progress bar.
    pub tick: &'a dyn Fn(String),
}

/// The settings of all rounds.
pub struct Soak<'a> {
    pub seed: u64,
    pub processes: usize,
    pub threads: usize,
    /// The faults to choose from. If this is empty, all faults are used.
    pub only: &'a [Kind],
    pub inject: Option<Defect>,
    pub stop: &'a Stop,
}

/// Violations, and the text that shows them.
#[derive(Default)]
pub struct Findings {
    pub violations: usize,
    pub text: String,
}

impl FromIterator<String> for Findings {
    fn from_iter<T: IntoIterator<Item = String>>(texts: T) -> Self {
        let mut findings = Self::default();
        for text in texts {
            findings.violations += 1;
            findings.text += &format!("violation: {text}\n");
        }
        findings
    }
}

/// How long the soak lasts.
#[derive(Clone, Copy)]
pub enum Length {
    Time(Duration),
    Rounds(u64),
}

impl Length {
    /// A progress bar of this length.
    fn bar(self) -> anyhow::Result<ProgressBar> {
        match self {
            Self::Time(time) => progress::bar_of_time(time, "{msg}"),
            Self::Rounds(rounds) => progress::bar(rounds, "{pos}/{len} {msg}"),
        }
    }

    /// The length of the round after `rounds` others. `None` after the last round.
    fn next(self, rounds: u64, elapsed: Duration, topology: &dyn Topology) -> Option<Duration> {
        let (shortest, longest) = topology.round_times();
        match self {
            Self::Time(time) => {
                let left = time.saturating_sub(elapsed);
                (left > shortest || rounds == 0).then(|| left.min(longest))
            }
            Self::Rounds(count) => (rounds < count).then_some(longest),
        }
    }
}

/// Plays rounds from the number `first` on. `again` makes the command that plays a round again.
pub fn drive(
    topology: &mut dyn Topology,
    soak: &Soak<'_>,
    length: Length,
    first: u64,
    again: impl Fn(u64) -> String,
) -> anyhow::Result<()> {
    let (start, bar) = (Instant::now(), length.bar()?);
    let mut findings = Findings::default();
    let mut number = first;
    let outcome = loop {
        let Some(time) = length.next(number - first, start.elapsed(), topology) else {
            break Ok(());
        };
        let tick = |text: String| {
            bar.set_position(match length {
                Length::Time(_) => start.elapsed().as_millis() as u64,
                Length::Rounds(_) => number - first,
            });
            bar.set_message(format!("round {number}: {text}, seed {}", soak.seed));
        };
        let round = Round {
            number,
            time,
            soak,
            tick: &tick,
        };
        match topology.play(&round) {
            Ok(found) => findings = found,
            Err(error) => {
                break Err(error.context(format!("round {number}, seed {}", soak.seed)));
            }
        }
        if findings.violations > 0 || soak.stop.requested() {
            break Ok(());
        }
        number += 1;
    };
    let outcome = outcome.and_then(|()| topology.finish());
    bar.finish_and_clear();
    print!("{}", findings.text);
    if let Ok(left) = &outcome {
        print!("{}", left.text);
    }
    println!("{}seed {}", topology.text(), soak.seed);
    let violations = findings.violations + outcome?.violations;
    if violations > 0 {
        let again = again(number);
        let text = format!("{violations} violations; to run this again: {again}");
        return Err(Finding(text).into());
    }
    if soak.stop.requested() {
        return Err(Stopped.into());
    }
    topology.check_use()?;
    println!("All of it holds.");
    Ok(())
}
