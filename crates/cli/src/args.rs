//! The command line.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};

use crate::acl;
use crate::exit::CONFLICT;
use crate::time::duration;

/// The place of options of all commands in a help text: behind the command's own options.
const BEHIND_OWN: usize = 900;

#[derive(Parser)]
#[command(
    name = "leasehold",
    version,
    about = "Runs commands under locks in Redis, and shows and frees locks"
)]
pub struct Cli {
    /// Explain each step on standard error
    #[arg(short, long, global = true, display_order = BEHIND_OWN)]
    pub verbose: bool,
    /// Print JSON: an object for each result, on a line of its own
    #[arg(long, global = true, display_order = BEHIND_OWN)]
    pub json: bool,
    // These options come last, since clap would put later options under their heading.
    #[command(flatten)]
    pub connection: Connection,
    #[command(subcommand)]
    pub task: Task,
}

#[derive(Subcommand)]
pub enum Task {
    /// Run a command under a lock, or under several
    Run(Run),
    /// Run a command while this process leads an election. Observers see a value, such as the address of this machine
    Elect(Elect),
    /// Write a line for each change of an election's leader
    Observe(Observe),
    /// Show the holders of a lock
    Inspect(Inspect),
    /// List the locks in Redis
    List(List),
    /// Show the locks and their changes: as a table on a terminal, otherwise as a line for each change
    Watch(Watch),
    /// Take a lock away from its holders
    Unlock(Unlock),
    /// Check that Redis can keep locks, and name what to change
    Doctor,
    /// Print the ACL rule of a user of leasehold, for redis-cli or an aclfile
    Acl(acl::Options),
    /// Print the completions for a shell
    Completions(Completions),
    /// Print the manual page, for man(1)
    Man,
}

/// The options about the connection. A variable of the environment or a line of a file can also set each of them.
#[derive(Args, Clone, Default)]
#[command(next_help_heading = "Connection")]
pub struct Connection {
    /// The address of Redis, without a password; several addresses are the nodes of a quorum. Other users can see
    /// arguments, so put an address with a password into LEASEHOLD_URL or into a file
    #[arg(long, global = true, value_name = "URL")]
    pub url: Vec<String>,
    /// A file with settings: lines such as LEASEHOLD_URL=redis://.. that replace variables of the environment
    #[arg(long, global = true, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// The beginning of all keys in Redis [LEASEHOLD_PREFIX; default: leasehold:]
    #[arg(long, global = true, value_name = "PREFIX")]
    pub prefix: Option<String>,
    /// Also wait for the locks of another library: plain-keys (redis-py, redsync, Redlock and others), redisson or
    /// redisson-fenced (these three need --prefix, which may be empty), or python-redis-lock
    /// [LEASEHOLD_COMPATIBLE_WITH]
    #[arg(long, global = true, value_name = "LIBRARY")]
    pub compatible_with: Option<String>,
}

/// The options of `run` and `elect`.
#[derive(Args)]
pub struct Turn {
    /// Fail at once if there is another holder
    #[arg(
        short,
        long,
        visible_alias = "nb",
        visible_alias = "nonblocking",
        conflicts_with = "wait"
    )]
    pub nonblock: bool,
    /// Fail if there is another holder for this time: seconds, or a number with ms, s, m, h or d
    #[arg(short, long, visible_alias = "timeout", value_name = "TIME", value_parser = duration)]
    pub wait: Option<Duration>,
    /// The exit code if there is another holder
    #[arg(short = 'E', long, value_name = "CODE", default_value_t = CONFLICT)]
    pub conflict_exit_code: u8,
    /// How long Redis keeps the lock if it is not renewed [LEASEHOLD_TTL; default: 30s]
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub ttl: Option<Duration>,
    /// The time between TERM and KILL when the lock is lost or could not be renewed: at most two fifths of the ttl
    /// [default: 5s, or a third of the ttl if that is shorter]
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub grace: Option<Duration>,
}

#[derive(Args)]
pub struct Run {
    #[command(flatten)]
    pub turn: Turn,
    /// Take the lock as a reader: other readers may have it at the same time
    #[arg(short, long, conflicts_with_all = ["exclusive", "permits", "min_hold", "once"])]
    pub shared: bool,
    /// Take the lock alone (the default)
    #[arg(short = 'x', short_alias = 'e', long)]
    pub exclusive: bool,
    /// Let up to N holders in at a time
    #[arg(long, value_name = "N", conflicts_with_all = ["exclusive", "once"])]
    pub permits: Option<u32>,
    /// Keep the lock taken for this time after its grant, even if the command ends earlier
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub min_hold: Option<Duration>,
    /// Run the command only if no run with this name has succeeded in the last seven days
    #[arg(long, value_name = "NAME")]
    pub once: Option<String>,
    /// Hold this lock; may be repeated. Then all words are the command
    #[arg(short, long = "key", value_name = "KEY")]
    pub keys: Vec<OsString>,
    /// KEY COMMAND [ARGUMENT]..; or KEY -c 'SHELL COMMAND'; or KEY [KEY].. -- COMMAND [ARGUMENT].. with one key or
    /// several, which are all held; or COMMAND [ARGUMENT].. after --key
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "KEY [KEY].. [--] COMMAND"
    )]
    pub words: Vec<OsString>,
}

#[derive(Args)]
pub struct Elect {
    #[command(flatten)]
    pub turn: Turn,
    /// NAME VALUE COMMAND [ARGUMENT]..; or NAME VALUE -c 'SHELL COMMAND'; or NAME VALUE -- COMMAND [ARGUMENT]..
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "NAME VALUE [--] COMMAND"
    )]
    pub words: Vec<OsString>,
}

#[derive(Args)]
pub struct Observe {
    /// The name of the election
    pub name: String,
    /// The state is unknown after Redis has not answered for this time [LEASEHOLD_TTL; default: 30s]
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub ttl: Option<Duration>,
}

#[derive(Args)]
pub struct Inspect {
    /// The name of the lock
    pub key: String,
}

#[derive(Args)]
pub struct List {
    /// The beginning of the names
    #[arg(default_value = "", value_name = "BEGINNING")]
    pub start: String,
    /// List only locks whose holders are known to hold them for longer than this
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub held_longer: Option<Duration>,
    /// List at most this many locks
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    pub max: usize,
}

#[derive(Args)]
pub struct Unlock {
    /// The name of the lock
    pub key: String,
    /// Take the lock away, although its holder may still be working
    #[arg(long)]
    pub force: bool,
    /// Take the lock only from this holder, as `inspect` shows it
    #[arg(long, value_name = "HOLDER")]
    pub holder: Option<String>,
}

#[derive(Args)]
pub struct Watch {
    /// The beginning of the names
    #[arg(default_value = "", value_name = "BEGINNING")]
    pub start: String,
    /// The pause between two lists
    #[arg(long, value_name = "TIME", value_parser = duration, default_value = "1s")]
    pub interval: Duration,
    /// Show at most this many locks
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    pub max: usize,
}

#[derive(Args)]
pub struct Completions {
    /// The shell
    pub shell: clap_complete::Shell,
}
