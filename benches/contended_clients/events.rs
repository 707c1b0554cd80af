//! The events of one worker, a line each: `<event> <ns> [<token or error>]`. The worker writes a line when
//! its event happens, so the log of a killed worker is complete.

use std::error::Error;
use std::fmt::Display;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::Path;

use crate::support;

/// A worker's log, open for writing.
pub struct Log(File);

/// One wait for the lock, and the hold that followed. Times are ns on the clock of all processes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Turn {
    pub asked: u64,
    pub entered: Option<u64>,
    pub token: u64,
    /// `None` for a holder that was killed.
    pub left: Option<u64>,
    /// The wait was cancelled at the end of the run, or failed.
    pub gave_up: bool,
    /// The lease was lost during the hold.
    pub lost: bool,
    /// Another process had the lock at the same time.
    pub company: bool,
}

#[derive(Debug, Default)]
pub struct Turns {
    pub turns: Vec<Turn>,
    pub errors: Vec<String>,
}

impl Log {
    pub fn create(path: &Path) -> io::Result<Self> {
        File::create(path).map(Self)
    }

    pub fn asked(&mut self) -> io::Result<()> {
        self.write("asked", "")
    }

    pub fn entered(&mut self, token: u64) -> io::Result<()> {
        self.write("entered", token)
    }

    pub fn left(&mut self) -> io::Result<()> {
        self.write("left", "")
    }

    pub fn lost(&mut self) -> io::Result<()> {
        self.write("lost", "")
    }

    pub fn company(&mut self) -> io::Result<()> {
        self.write("company", "")
    }

    pub fn cancelled(&mut self) -> io::Result<()> {
        self.write("cancelled", "")
    }

    pub fn error(&mut self, error: impl Display) -> io::Result<()> {
        let error = error.to_string().replace('\n', " ");
        self.write("error", error)
    }

    /// Writes a line with one write, so the line is complete or missing.
    fn write(&mut self, event: &str, more: impl Display) -> io::Result<()> {
        let now = support::nanoseconds();
        self.0
            .write_all(format!("{event} {now} {more}\n").as_bytes())
    }
}

impl Turns {
    pub fn read(log: &Path) -> Result<Self, Box<dyn Error>> {
        let mut read = Self::default();
        for line in fs::read_to_string(log)?.lines() {
            let mut words = line.splitn(3, ' ');
            let mut word = || words.next().ok_or_else(|| format!("bad line {line:?}"));
            let (event, at, more) = (word()?, word()?.parse()?, word()?);
            if event == "asked" {
                read.turns.push(Turn {
                    asked: at,
                    ..Turn::default()
                });
                continue;
            }
            let turn = read.turns.last_mut().ok_or("a log begins with a request")?;
            match event {
                "entered" => (turn.entered, turn.token) = (Some(at), more.parse()?),
                "left" => turn.left = Some(at),
                "lost" => turn.lost = true,
                "company" => turn.company = true,
                "cancelled" => turn.gave_up = true,
                "error" => {
                    turn.gave_up = true;
                    read.errors.push(more.to_owned());
                }
                other => return Err(format!("unknown event {other:?}").into()),
            }
        }
        Ok(read)
    }

    /// Whether the worker is inside, or about to be.
    pub fn is_holding(&self) -> bool {
        let last = self.turns.last();
        last.is_some_and(|turn| turn.entered.is_some() && turn.left.is_none())
    }
}
