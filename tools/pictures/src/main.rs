//! `cargo xtask pictures`: runs `list`, `watch` and `doctor` on a real server, in a terminal of tmux, and draws their
//! output as `docs/pictures/*.svg`.
//!
//! Also writes `docs/pictures/links.txt`, which contains the pictures as link definitions for the API docs: those have
//! no other place for pictures.

mod svg;

use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, ensure};
use clap::Parser;
use leasehold_testbed::{Server, eventually};
use leasehold_tools::cargo;
use leasehold_tools::stop::Stop;

const COLUMNS: &str = "100";
const ROWS: &str = "16";
/// The time limit for a command to draw its output.
const LIMIT: Duration = Duration::from_secs(30);

/// The pictures: a name, the arguments of `leasehold`, and text at the end of the output.
const PICTURES: [(&str, &str, &str); 3] = [
    ("list", "list", "search-index"),
    ("watch", "watch", "search-index"),
    ("doctor", "doctor", "notifications"),
];

/// The exclusive locks: the name, the holder, the age in seconds if Redis knows it, the rest of the ttl in seconds, and
/// the number of waiting clients.
const LOCKS: [(&str, &str, Option<u64>, u64, usize); 4] = [
    ("deploy:web", "ci-2/31544/5e07a9d1", Some(412), 24, 3),
    ("invoice:2026-11", "worker-1/812/c2d80f36", Some(47), 28, 1),
    (
        "report:nightly",
        "cron-1/20977/08b1e6f4",
        Some(5_400),
        21,
        0,
    ),
    ("search-index", "worker-3/799/91f3c05a", None, 26, 0),
];
/// The shared locks: the name, the kind as in the members of a shared key, the limit, and the holders.
const SHARED: [(&str, &str, u32, &[&str]); 2] = [
    (
        "catalog",
        "r",
        0,
        &[
            "web-1/4711/9f3a1c20",
            "web-2/4698/3b7d52ee",
            "web-3/5020/d1046c8f",
        ],
    ),
    (
        "encoder",
        "p",
        8,
        &["media-1/951/7ac4e08b", "media-2/1033/e69b1d72"],
    ),
];

#[derive(Parser)]
#[command(
    name = "leasehold-pictures",
    bin_name = "cargo xtask pictures",
    about = "Draw the pictures of the program `leasehold` in docs/ (needs tmux)"
)]
struct Options {}

fn main() -> std::process::ExitCode {
    Options::parse();
    leasehold_tools::run(draw)
}

fn draw(stop: &Stop) -> anyhow::Result<()> {
    let program = cargo::command_line(stop)?;
    let folder = cargo::workspace_root()?.join("docs/pictures");
    let server = Server::start()?;
    let mut links = String::new();
    for (name, arguments, last) in PICTURES {
        server.command(&["FLUSHALL"])?;
        if name != "doctor" {
            hold_locks(&server)?;
        }
        let lines = output(&program, &server, arguments, last)?;
        let picture = svg::draw(&lines);
        let path = folder.join(format!("{name}.svg"));
        fs::write(&path, &picture).with_context(|| path.display().to_string())?;
        println!("{}", path.display());
        links += &format!("[picture of {name}]: <{}>\n", svg::link(&picture));
    }
    fs::write(folder.join("links.txt"), links)?;
    Ok(())
}

/// Stores locks, as clients on other machines would: docs/redis.md describes the format.
fn hold_locks(server: &Server) -> anyhow::Result<()> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?;
    let mut lease = 0;
    let mut next_lease = || {
        lease += 1;
        format!("{lease:032x}")
    };
    for (key, holder, age, left, waiting) in LOCKS {
        let since = age.map_or(0, |age| (now - Duration::from_secs(age)).as_micros());
        let value = format!("lh1 {} {since:016} {holder}", next_lease());
        let key_in_redis = format!("leasehold:{key}");
        server.command(&["SET", &key_in_redis, &value, "EX", &left.to_string()])?;
        for number in 0..waiting {
            let queue = format!("leasehold:~queue:{key}");
            let entry = format!("{},30000,worker-{number}/1/00000000", next_lease());
            server.command(&["ZADD", &queue, &number.to_string(), &entry])?;
        }
    }
    for (key, kind, limit, holders) in SHARED {
        let key = format!("leasehold:{key}");
        let end = now + Duration::from_secs(29);
        for holder in holders {
            let member = format!("lh1 {} {kind} 1 1 {limit} {holder}", next_lease());
            server.command(&["ZADD", &key, &end.as_millis().to_string(), &member])?;
        }
        // The key expires a second after its last share.
        server.command(&["PEXPIRE", &key, "30000"])?;
    }
    Ok(())
}

/// Runs `leasehold` in a terminal. Returns the lines of the terminal with their colours once `last` is among them.
fn output(
    program: &Path,
    server: &Server,
    arguments: &str,
    last: &str,
) -> anyhow::Result<Vec<String>> {
    let terminal = Terminal::start(program, server, arguments)?;
    let mut lines = Vec::new();
    let is_drawn = eventually(LIMIT, || {
        lines = terminal.lines().unwrap_or_default();
        lines.iter().any(|line| line.contains(last))
    });
    ensure!(is_drawn, "leasehold {arguments} has written: {lines:#?}");
    Ok(lines)
}

/// A server of tmux with one terminal. Its drop ends both.
struct Terminal {
    socket: String,
}

impl Terminal {
    fn start(program: &Path, server: &Server, arguments: &str) -> anyhow::Result<Self> {
        let terminal = Self {
            socket: format!("leasehold-pictures-{}", std::process::id()),
        };
        // The prompt and the command are a part of the picture. The terminal stays open.
        let script = format!(
            "printf '$ leasehold {arguments}\\n'; '{}' {arguments}; exec cat",
            program.display()
        );
        let size = ["-x", COLUMNS, "-y", ROWS];
        let url = format!("LEASEHOLD_URL={}", server.url());
        let start = ["-f", "/dev/null", "new-session", "-d", "-e", &url];
        terminal.tmux(&[&start[..], &size[..], &[&script]].concat())?;
        Ok(terminal)
    }

    fn lines(&self) -> anyhow::Result<Vec<String>> {
        let output = self.tmux(&["capture-pane", "-p", "-e"])?;
        let text = String::from_utf8(output.stdout)?;
        Ok(text.trim_end().lines().map(str::to_owned).collect())
    }

    fn tmux(&self, arguments: &[&str]) -> anyhow::Result<Output> {
        let mut command = Command::new("tmux");
        let command = command.args(["-L", &self.socket]).args(arguments);
        let output = command.output().context("cannot start tmux: install it")?;
        let errors = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "tmux: {errors}");
        Ok(output)
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.tmux(&["kill-server"]);
    }
}
