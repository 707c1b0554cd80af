//! `cargo xtask fuzz`: runs the tests that generate inputs again and again, with new inputs, until the time is up or a
//! test fails. It runs all unit tests of the library whose names contain `fuzz_`.

use std::fs::File;
use std::io::{Read as _, Seek as _};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use leasehold_tools::cargo::{cargo, run_to_end, run_within};
use leasehold_tools::options::minutes;
use leasehold_tools::progress;
use leasehold_tools::stop::Stop;

/// How long a round should take. Progress is shown between rounds.
const ROUND: Duration = Duration::from_secs(10);
/// A round that takes longer counts as hanging, which is a failure, too.
const LONGEST_ROUND: Duration = Duration::from_secs(300);
/// Inputs of each test in the first round.
const FIRST_CASES: u32 = 256;

#[derive(clap::Args)]
pub struct Options {
    /// Minutes to run
    #[arg(long, default_value_t = 60.0, value_parser = minutes)]
    minutes: f64,
    /// Run only tests whose names contain this
    #[arg(long, default_value = "fuzz_")]
    tests: String,
}

pub fn run(options: &Options, stop: &Stop) -> anyhow::Result<()> {
    let time = Duration::from_secs_f64(options.minutes * 60.0);
    let mut build = cargo()?;
    let status = run_to_end(build.args(TEST).arg("--no-run"), stop)?;
    ensure!(status.success(), "the tests cannot be built: {status}");
    println!("leasehold fuzz: {} minutes", options.minutes);
    let (start, bar) = (Instant::now(), progress::bar_of_time(time, "{msg}")?);
    let (mut cases, mut inputs) = (FIRST_CASES, 0);
    let mut tests = 0;
    while start.elapsed() < time {
        let began = Instant::now();
        match round(&options.tests, cases, stop) {
            Ok(passed) => tests = passed,
            Err(error) => {
                bar.finish_and_clear();
                println!("{inputs} inputs passed before that.");
                return Err(error);
            }
        }
        inputs += u64::from(cases) * tests;
        bar.set_position(start.elapsed().min(time).as_millis() as u64);
        bar.set_message(format!("{inputs} inputs"));
        let left = time.saturating_sub(start.elapsed());
        cases = next_cases(cases, began.elapsed(), left.min(ROUND));
    }
    bar.finish_and_clear();
    println!("{inputs} inputs to {tests} tests: no failures.");
    Ok(())
}

const TEST: [&str; 4] = ["test", "--locked", "--package=leasehold", "--lib"];

/// Runs the tests with `cases` inputs each. Returns the number of tests.
fn round(tests: &str, cases: u32, stop: &Stop) -> anyhow::Result<u64> {
    let mut output = tempfile::tempfile().context("cannot make a temporary file")?;
    let write = |output: &File| anyhow::Ok(Stdio::from(output.try_clone()?));
    let mut command = cargo()?;
    command
        .args(TEST)
        .args(["--", tests])
        // PROPTEST_RNG_SEED is not set. So each run draws its own seed, and saves the seed of a failure in a file.
        .env("PROPTEST_CASES", cases.to_string())
        .env_remove("PROPTEST_RNG_SEED")
        .stdout(write(&output)?)
        .stderr(write(&output)?);
    let status = run_within(LONGEST_ROUND, &mut command, stop)?;
    let mut text = String::new();
    output.rewind()?;
    output.read_to_string(&mut text)?;
    match status {
        Some(status) if status.success() => {
            let passed =
                passed(&text).with_context(|| format!("the output of cargo was: {text}"))?;
            ensure!(passed > 0, "no test has {tests:?} in its name");
            Ok(passed)
        }
        failed => {
            println!("{text}");
            let what = failed.map_or("a test hangs".to_owned(), |status| status.to_string());
            bail!(
                "{what}; the failing input is above, and its seed is in proptest-regressions/: `cargo test \
                --lib {tests}` tries it first"
            )
        }
    }
}

/// The number of passed tests, from the last line of their program.
fn passed(text: &str) -> Option<u64> {
    let line = text
        .lines()
        .find(|line| line.starts_with("test result: ok. "))?;
    line.split(' ').nth(3)?.parse().ok()
}

/// The number of inputs for a round of `time`, after `cases` took `took`. Grows tenfold at most, since the time of the
/// short first round is not exact.
fn next_cases(cases: u32, took: Duration, time: Duration) -> u32 {
    let factor = time.as_secs_f64() / took.as_secs_f64().max(0.001);
    (f64::from(cases) * factor.min(10.0)).clamp(1.0, 1e9) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passed_tests_are_counted() {
        let text = "\nrunning 7 tests\n.......\ntest result: ok. 7 passed; 0 failed; 0 ignored; 0 measured\n";
        assert_eq!(passed(text), Some(7));
        assert_eq!(passed("test result: FAILED. 6 passed; 1 failed"), None);
    }

    #[test]
    fn a_round_is_as_long_as_its_time() {
        let second = Duration::from_secs(1);
        assert_eq!(next_cases(1000, 2 * second, 10 * second), 5000);
        assert_eq!(next_cases(1000, second / 1000, 10 * second), 10_000);
        assert_eq!(next_cases(1000, 10 * second, second), 100);
        assert_eq!(next_cases(1000, second, Duration::ZERO), 1);
    }
}
