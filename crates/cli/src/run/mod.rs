//! `leasehold run` and `leasehold elect`: run a command while locks are held, or while this process leads an election.

mod group;
mod hold;
pub mod keeper;
mod left;
pub mod signals;
mod supervisor;
mod terminal;

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::{self, Metadata};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use leasehold::{Client, Error, ErrorKind, Released};
use signal_hook::consts::SIGINT;

use crate::args::{Connection, Elect, Run, Turn};
use crate::connection::Settings;
use crate::exit::{Failure, LOST};
use crate::output::message;
use crate::run::group::Group;
use crate::run::hold::{Hold, Set, Term, names};
use crate::run::signals::Signals;
use crate::run::supervisor::{Limits, Outcome};

/// The longest default of `--grace`.
const GRACE: Duration = Duration::from_secs(5);

/// Runs a command under a lock, or under several.
pub fn run(connection: &Connection, options: &Run, verbose: bool) -> Result<ExitCode, Failure> {
    let words = Words::of_run(options)?;
    run_words(connection, &options.turn, &words, verbose).map(Ended::exit)
}

/// Runs a command while this process leads an election.
pub fn elect(connection: &Connection, options: &Elect, verbose: bool) -> Result<ExitCode, Failure> {
    let words = Words::of_elect(options)?;
    run_words(connection, &options.turn, &words, verbose).map(Ended::exit)
}

/// How a run has ended.
enum Ended {
    Code(ExitCode),
    /// Ctrl-C has ended the command.
    Interrupted,
}

impl Ended {
    fn exit(self) -> ExitCode {
        match self {
            Self::Code(code) => code,
            Self::Interrupted => {
                terminal::interrupt();
                ExitCode::from(signals::code(SIGINT))
            }
        }
    }
}

fn run_words(
    connection: &Connection,
    turn: &Turn,
    words: &Words<'_>,
    verbose: bool,
) -> Result<Ended, Failure> {
    let settings = Settings::read(connection, turn.ttl)?;
    let limits = limits(settings.ttl, turn.grace)?;
    let builder = settings.builder()?;
    let known = left::adopt();
    let signals = Signals::start()?;
    // The keeper starts while this program connects.
    let mut group = Group::start()?;
    let client = builder.build_lazy()?;
    let runner = Runner {
        client: &client,
        turn,
        signals: &signals,
        verbose,
    };
    let started = Instant::now();
    let acquired = match words.wanted {
        Wanted::Locks(options) => runner.acquire(options, &words.keys),
        Wanted::Lead { value } => runner.campaign(&words.keys[0], value),
    };
    let hold = match acquired {
        Ok(Some(hold)) => hold,
        Ok(None) => {
            let one = if words.keys.len() > 1 { "one of " } else { "" };
            runner.explain(format_args!("{one}{} has another holder", words.names()));
            return Ok(Ended::Code(ExitCode::from(turn.conflict_exit_code)));
        }
        Err(error) => return runner.not_acquired(error).map(Ended::Code),
    };
    let token = |(_, token): (&str, Option<u64>)| token.map(|token| token.to_string());
    let tokens: Vec<String> = hold.tokens().into_iter().filter_map(token).collect();
    runner.explain(format_args!(
        "got {} after {:.1?}; fencing tokens: {}",
        words.names(),
        started.elapsed(),
        if tokens.is_empty() {
            "none".to_owned()
        } else {
            tokens.join(", ")
        }
    ));
    let mut command = Command::new(words.command[0]);
    command.args(&words.command[1..]);
    let mut work = |holds: &[&dyn Hold]| {
        supervisor::run(&mut command, holds, &signals, limits, &mut group, &known)
    };
    let outcome = match words.once() {
        None => work(&[&*hold])?,
        Some(name) => runner.run_once(name, &*hold, work)?,
    };
    runner.finish(hold, outcome)
}

/// The times of the supervision. `grace` is at most two fifths of the ttl, and the margin at most a tenth. So the client
/// has half of the ttl to repeat a failed renewal before the command gets TERM.
fn limits(ttl: Duration, grace: Option<Duration>) -> Result<Limits, Failure> {
    let grace = grace.unwrap_or(GRACE.min(ttl / 3));
    let most = ttl * 2 / 5;
    if grace > most {
        return Err(Failure::usage(format!(
            "--grace must be at most two fifths of the ttl of {ttl:?}, which is {most:?}: set a longer --ttl"
        )));
    }
    Ok(Limits { ttl, grace })
}

/// The lock or the lead that the command needs.
enum Wanted<'a> {
    /// The locks of all keys, in the mode of these options.
    Locks(&'a Run),
    /// The lead of the election that the only key names. The leader proclaims `value`.
    Lead { value: &'a [u8] },
}

/// The words on the command line: the keys and the command.
struct Words<'a> {
    wanted: Wanted<'a>,
    /// In the order of the arguments.
    keys: Vec<String>,
    command: Vec<&'a OsStr>,
}

impl<'a> Words<'a> {
    fn of_run(options: &'a Run) -> Result<Self, Failure> {
        let words = &options.words;
        let (keys, rest) = match &options.keys[..] {
            [] => {
                // The first `--` ends the keys. Without one, there is one key.
                let separator = words.iter().position(|word| word == "--");
                words.split_at(separator.unwrap_or(1).min(words.len()))
            }
            keys => (keys, &words[..]),
        };
        if options.keys.is_empty()
            && let [first, second, ..] = keys
            && is_program(second)
        {
            let (first, second) = (first.display(), second.display());
            return Err(Failure::usage(format!(
                "all words before -- are keys, but {second} is also a program. If it is the command, write \
                 `run {first} -- {second} ..`. If it is a key, write `run --key {first} --key {second} ..`"
            )));
        }
        if keys.is_empty() {
            return Err(Failure::usage("run needs a key and a command"));
        }
        let keys: Vec<String> = keys.iter().map(key).collect::<Result<_, _>>()?;
        if keys.len() > 1
            && (options.shared || options.permits.is_some() || options.min_hold.is_some())
        {
            return Err(Failure::usage(format!(
                "-s, --permits and --min-hold need a single key, but there are {} keys",
                keys.len()
            )));
        }
        Ok(Self {
            wanted: Wanted::Locks(options),
            keys,
            command: command(rest)?,
        })
    }

    fn of_elect(options: &'a Elect) -> Result<Self, Failure> {
        let [name, value, rest @ ..] = &options.words[..] else {
            return Err(Failure::usage("elect needs a name, a value and a command"));
        };
        let value = value.as_bytes();
        if value.starts_with(b"-") {
            return Err(Failure::usage(
                "options stand before the name, and the value must not begin with -",
            ));
        }
        Ok(Self {
            wanted: Wanted::Lead { value },
            keys: vec![key(name)?],
            command: command(rest)?,
        })
    }

    /// The name in `--once`: the command runs only if a run with this name has not succeeded before.
    fn once(&self) -> Option<&'a str> {
        match self.wanted {
            Wanted::Locks(options) => options.once.as_deref(),
            Wanted::Lead { .. } => None,
        }
    }

    fn names(&self) -> String {
        names(self.keys.iter().map(String::as_str))
    }
}

/// Reads a key.
fn key(word: &OsString) -> Result<String, Failure> {
    let key = word
        .to_str()
        .ok_or_else(|| Failure::usage("the key is not UTF-8"))?;
    if key.starts_with('-') {
        return Err(Failure::usage(format!(
            "{key}: a key must not begin with -. All words before the first -- are keys: if the command contains --, put \
             another one before the command"
        )));
    }
    Ok(key.to_owned())
}

/// Whether this word, as the first word of a command, starts a program.
fn is_program(word: &OsStr) -> bool {
    let is_executable = |path: &Path| {
        let mode = |file: Metadata| file.is_file() && file.permissions().mode() & 0o111 != 0;
        fs::metadata(path).is_ok_and(mode)
    };
    if word.as_bytes().contains(&b'/') {
        return is_executable(Path::new(word));
    }
    let folders = env::var_os("PATH").unwrap_or_else(|| "/bin:/usr/bin".into());
    env::split_paths(&folders).any(|folder| is_executable(&folder.join(word)))
}

/// Reads the words of a command: `-- COMMAND ..`, `-c TEXT` or `COMMAND ..`.
fn command(words: &[OsString]) -> Result<Vec<&OsStr>, Failure> {
    let mut command: Vec<&OsStr> = words.iter().map(OsString::as_os_str).collect();
    match command[..] {
        [separator, ..] if separator == "--" => drop(command.remove(0)),
        [option, text] if option == "-c" => command = vec![OsStr::new("sh"), option, text],
        [option, ..] if option == "-c" => {
            return Err(Failure::usage(
                "-c needs exactly one argument: the text for the shell",
            ));
        }
        [first, ..] if first.as_encoded_bytes().starts_with(b"-") => {
            return Err(Failure::usage(format!(
                "{}: options stand before the key; put -- before a command that begins with -",
                first.display()
            )));
        }
        _ => {}
    }
    if command.is_empty() {
        return Err(Failure::usage("there is no command to run under the lock"));
    }
    Ok(command)
}

struct Runner<'a> {
    client: &'a Client,
    turn: &'a Turn,
    signals: &'a Signals,
    verbose: bool,
}

/// The reason for which work under `--once` leaves no record.
enum Stop {
    Library(Error),
    Work(Outcome),
    Failure(Failure),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self::Library(error)
    }
}

impl Runner<'_> {
    fn explain(&self, text: std::fmt::Arguments<'_>) {
        if self.verbose {
            message(text);
        }
    }

    /// Acquires the locks. `None` if one of them has another holder.
    fn acquire(&self, options: &Run, keys: &[String]) -> Result<Option<Box<dyn Hold>>, Error> {
        let cancelled = self.signals.cancelled();
        let wait = self.wait();
        /// Makes one of the three kinds of call.
        macro_rules! acquire {
            ($lock:expr, $lock_call:ident, $try_call:ident, $try_for:ident) => {
                acquire!($lock, $lock_call, $try_call, $try_for, |guard| guard)
            };
            ($lock:expr, $lock_call:ident, $try_call:ident, $try_for:ident, $hold:expr) => {{
                let lock = $lock.cancelled_by(cancelled);
                let guard = match wait {
                    None => Some(lock.$lock_call()?),
                    Some(Duration::ZERO) => lock.$try_call()?,
                    Some(time) => lock.$try_for(time)?,
                };
                let hold = $hold;
                Ok(guard.map(|guard| Box::new(hold(guard)) as Box<dyn Hold>))
            }};
        }
        let [key] = keys else {
            let set = |guard| Set {
                guard,
                keys: keys.to_vec(),
            };
            return acquire!(self.client.mutexes(keys), lock, try_lock, try_lock_for, set);
        };
        let min_hold = options.min_hold.unwrap_or_default();
        if options.shared {
            acquire!(self.client.rw_lock(key), read, try_read, try_read_for)
        } else if let Some(permits) = options.permits {
            let semaphore = self.client.semaphore(key, permits).min_hold(min_hold);
            acquire!(semaphore, acquire, try_acquire, try_acquire_for)
        } else {
            let mutex = self.client.mutex(key).min_hold(min_hold);
            acquire!(mutex, lock, try_lock, try_lock_for)
        }
    }

    /// Becomes the leader. `None` if the election has another leader.
    fn campaign(&self, name: &str, value: &[u8]) -> Result<Option<Box<dyn Hold>>, Error> {
        let election = self.client.election(name);
        let election = election.cancelled_by(self.signals.cancelled());
        let leader = match self.wait() {
            None => Some(election.campaign(value)?),
            Some(Duration::ZERO) => election.try_campaign(value)?,
            Some(time) => election.try_campaign_for(time, value)?,
        };
        Ok(leader.map(|leader| Box::new(Term { leader }) as Box<dyn Hold>))
    }

    /// The maximum wait for the lock. `None` if it has no limit.
    fn wait(&self) -> Option<Duration> {
        match self.turn.nonblock {
            true => Some(Duration::ZERO),
            false => self.turn.wait,
        }
    }

    fn not_acquired(&self, error: Error) -> Result<ExitCode, Failure> {
        match self.signals.ended_by() {
            Some(signal) if error.kind() == ErrorKind::Cancelled => {
                Ok(ExitCode::from(signals::code(signal)))
            }
            _ => Err(error.into()),
        }
    }

    /// Runs `work` unless a run with this name has succeeded before.
    fn run_once(
        &self,
        name: &str,
        hold: &dyn Hold,
        work: impl FnOnce(&[&dyn Hold]) -> Result<Outcome, Failure>,
    ) -> Result<Outcome, Failure> {
        // If the lock is lost during the wait for the name, the wait ends.
        hold.report_loss(Box::new(self.signals.loss_reporter()));
        let once = self
            .client
            .once(name)
            .cancelled_by(self.signals.cancelled());
        let work = |guard: &leasehold::MutexGuard| match work(&[hold, guard]) {
            Ok(Outcome::Exited(0)) => Ok(()),
            Ok(outcome) => Err(Stop::Work(outcome)),
            Err(failure) => Err(Stop::Failure(failure)),
        };
        let run = match self.wait() {
            None => once.run(work).map(Some),
            Some(time) => once.try_run_for(time, work),
        };
        match run {
            Ok(Some(leasehold::Run::Ran(()))) => Ok(Outcome::Exited(0)),
            Ok(Some(leasehold::Run::Done(record))) => {
                self.explain(format_args!(
                    "{name} has run before, by {}",
                    record.holder()
                ));
                Ok(Outcome::NotStarted(0))
            }
            Ok(Some(leasehold::Run::Interrupted(record))) => {
                self.explain(format_args!(
                    "{name} was interrupted before, at {}",
                    record.holder()
                ));
                Ok(Outcome::NotStarted(self.turn.conflict_exit_code))
            }
            Ok(None) => {
                self.explain(format_args!("{name} runs elsewhere"));
                Ok(Outcome::NotStarted(self.turn.conflict_exit_code))
            }
            Err(Stop::Work(outcome)) => Ok(outcome),
            Err(Stop::Failure(failure)) => Err(failure),
            Err(Stop::Library(error)) if error.kind() == ErrorKind::Cancelled => {
                match (self.signals.ended_by(), hold.check()) {
                    (Some(signal), _) => Ok(Outcome::NotStarted(signals::code(signal))),
                    (None, Err(lost)) => Ok(Outcome::lost_before_start(&lost)),
                    (None, Ok(())) => Err(error.into()),
                }
            }
            Err(Stop::Library(error)) => Err(error.into()),
        }
    }

    /// Releases the lock.
    fn finish(&self, hold: Box<dyn Hold>, outcome: Outcome) -> Result<Ended, Failure> {
        let is_interrupted = matches!(outcome, Outcome::Interrupted);
        let was_started = !matches!(outcome, Outcome::NotStarted(_));
        let code = match outcome {
            Outcome::Exited(code) | Outcome::NotStarted(code) => code,
            Outcome::Interrupted => signals::code(SIGINT),
            Outcome::Lost(reason) => {
                // The drop releases the lock if Redis still has it.
                drop(hold);
                return Err(Failure::new(LOST, reason));
            }
        };
        let names = names(hold.tokens().into_iter().map(|(key, _)| key));
        match hold.unlock() {
            Ok(Released::Unconfirmed(error)) => {
                self.explain(format_args!("Redis has not confirmed the release: {error}"));
            }
            Ok(_) if was_started => {
                self.explain(format_args!("released {names}, after {}", Code(code)));
            }
            Ok(_) => self.explain(format_args!("released {names}")),
            Err(error) => {
                let command = match was_started {
                    true => format!("the command had ended with {} by then", Code(code)),
                    false => "the command was not started".to_owned(),
                };
                return Err(Failure::new(LOST, format!("{error}; {command}")));
            }
        }
        Ok(match is_interrupted {
            true => Ended::Interrupted,
            false => Ended::Code(ExitCode::from(code)),
        })
    }
}

/// Shows an exit code.
struct Code(u8);

impl std::fmt::Display for Code {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "exit code {}", self.0)
    }
}
