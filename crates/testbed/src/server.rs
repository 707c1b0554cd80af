//! A private server for a test or a demo. Never touches a server that it did not start.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use std::{fs, mem};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::builder::ServerBuilder;
use crate::connection::Connection;
use crate::keeper::Keeper;
use crate::reply::Reply;
use crate::{Error, clock, eventually, port};

/// How long a server may take to reply after its start, on a busy machine.
const START_LIMIT: Duration = Duration::from_secs(20);
/// The limit for each step of [`Server::command`].
const COMMAND_LIMIT: Duration = Duration::from_secs(30);
/// The number of ports that are tried for a new server.
const PORT_LIMIT: usize = 20;
/// How long another program may use the port of a server that restarts.
const PORT_BACK_LIMIT: Duration = Duration::from_secs(10);

/// A private redis-server (or valkey-server) with a free port on 127.0.0.1 and a temporary directory, without
/// persistence. Dropping it ends the process and removes the directory. The same happens if the program that started it
/// is killed.
pub struct Server {
    // Dropped before the directory, so the server ends first.
    keeper: Option<Keeper>,
    directory: TempDir,
    program: PathBuf,
    config: ServerBuilder,
    port: u16,
    /// Zero without TLS.
    tls_port: u16,
    pid: u32,
}

enum Failure {
    AddressInUse(Error),
    Other(Error),
}

impl Server {
    /// Starts a server and waits until it replies.
    ///
    /// # Errors
    /// No server program is installed (see [`provide_server`](crate::provide_server)), or it ends at once or
    /// does not reply within 20 s; the error then quotes its log.
    pub fn start() -> Result<Server, Error> {
        Server::builder().start()
    }

    /// A server with settings of its own.
    pub fn builder() -> ServerBuilder {
        ServerBuilder::default()
    }

    pub(crate) fn launch(
        program: PathBuf,
        directory: TempDir,
        config: ServerBuilder,
    ) -> Result<Server, Error> {
        let mut server = Server {
            keeper: None,
            directory,
            program,
            config,
            port: 0,
            tls_port: 0,
            pid: 0,
        };
        if server.config.clock().is_some() {
            clock::write(server.directory.path(), 0)?;
        }
        let mut tries = 0;
        loop {
            let free = || {
                port::free()
                    .map_err(|error| Error::io("no free port was found on 127.0.0.1", error))
            };
            // The port of the bus follows from the port that the other nodes use.
            let free_for_nodes = || match server.config.is_in_cluster() {
                true => port::free_with_bus().map_err(|error| {
                    Error::io("no free ports for a node of a Cluster were found", error)
                }),
                false => free(),
            };
            (server.port, server.tls_port) = match server.config.has_tls() {
                true => (free()?, free_for_nodes()?),
                false => (free_for_nodes()?, 0),
            };
            tries += 1;
            match server.run() {
                Ok(()) => return Ok(server),
                Err(Failure::AddressInUse(_)) if tries < PORT_LIMIT => {}
                Err(Failure::AddressInUse(error) | Failure::Other(error)) => return Err(error),
            }
        }
    }

    /// `redis://127.0.0.1:PORT`, with `:password@` when one is set.
    pub fn url(&self) -> String {
        let login = match self.config.password_in_url() {
            Some(password) => format!(":{password}@"),
            None => String::new(),
        };
        format!("redis://{login}127.0.0.1:{}", self.port)
    }

    /// `unix:///PATH`, with `?pass=password` when one is set; `None` unless [`ServerBuilder::unix_socket`]
    /// was called.
    pub fn unix_url(&self) -> Option<String> {
        let path = self.config.socket_path(self.directory.path())?;
        let login = match self.config.password_in_url() {
            Some(password) => format!("?pass={password}"),
            None => String::new(),
        };
        Some(format!("unix://{}{login}", path.display()))
    }

    /// `rediss://127.0.0.1:PORT`, with `:password@` when one is set; `None` unless the builder was asked for TLS.
    pub fn tls_url(&self) -> Option<String> {
        let url = self.config.has_tls().then(|| self.url())?;
        let (login, _) = url.strip_prefix("redis")?.rsplit_once(':')?;
        Some(format!("rediss{login}:{}", self.tls_port))
    }

    /// The port with TLS on 127.0.0.1; zero without TLS.
    pub fn tls_port(&self) -> u16 {
        self.tls_port
    }

    /// The port on 127.0.0.1, the same for the server's whole life.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The process id of the server itself; after [`kill`](Server::kill), the former one.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Stops the process with SIGSTOP, and returns once it is stopped. Connections stay open, and the kernel accepts
    /// new ones, but no request is answered.
    ///
    /// # Panics
    /// When the process is not running.
    pub fn stop(&self) {
        self.signal(Signal::STOP);
        let stopped = eventually(START_LIMIT, || is_stopped(self.pid));
        assert!(stopped, "process {} does not stop after SIGSTOP", self.pid);
    }

    /// Resumes a stopped process with SIGCONT.
    ///
    /// # Panics
    /// When the process is not running.
    pub fn resume(&self) {
        self.signal(Signal::CONT);
    }

    /// Sets how far the server's own clock is ahead of the machine's clock, in µs; negative if it is behind. The clock
    /// keeps the offset when the server restarts.
    ///
    /// # Errors
    /// The server's directory cannot be written.
    ///
    /// # Panics
    /// The server was not built with [`ServerBuilder::own_clock`].
    pub fn set_clock_offset(&self, micros: i64) -> Result<(), Error> {
        assert!(
            self.config.clock().is_some(),
            "the server has the machine's clock"
        );
        clock::write(self.directory.path(), micros)
    }

    /// Ends the process with SIGKILL, and returns once it is gone. Does nothing if it has ended.
    pub fn kill(&mut self) {
        self.keeper = None;
    }

    /// Starts the server again, on the same port and directory, and waits until it replies. The server is empty, unless
    /// a setting has switched persistence on. Kills a running server first.
    ///
    /// # Errors
    /// The errors of [`start`](Server::start). In addition: another program has used the port for 10 s.
    pub fn restart(&mut self) -> Result<(), Error> {
        self.kill();
        let start = Instant::now();
        loop {
            match self.run() {
                Err(Failure::AddressInUse(_)) if start.elapsed() < PORT_BACK_LIMIT => {}
                Err(Failure::AddressInUse(error) | Failure::Other(error)) => return Err(error),
                Ok(()) => return Ok(()),
            }
        }
    }

    /// The same as [`restart`](Server::restart), with another line in redis.conf: see [`ServerBuilder::arg`].
    ///
    /// # Errors
    /// The errors of [`restart`](Server::restart).
    pub fn restart_with(
        &mut self,
        directive: impl Into<String>,
        value: impl Into<String>,
    ) -> Result<(), Error> {
        self.config = mem::take(&mut self.config).arg(directive, value);
        self.restart()
    }

    /// Sends one command over a connection of its own and returns the reply, after the server has closed that
    /// connection. A refusal is `Ok(Reply::Error(..))`.
    ///
    /// # Errors
    /// The server is not running, or does not reply within 30 s.
    pub fn command(&self, args: &[&str]) -> Result<Reply, Error> {
        Connection::open(self.port, self.config.password_text(), COMMAND_LIMIT)
            .and_then(|mut connection| {
                let reply = connection.command(args)?;
                connection.close();
                Ok(reply)
            })
            .map_err(|error| {
                let name = args.first().unwrap_or(&"");
                Error::io(format!("{name} on the server at port {}", self.port), error)
            })
    }

    /// How often the server has run `command`, in lower case, since its start, including calls by scripts.
    ///
    /// # Errors
    /// The errors of [`command`](Self::command).
    ///
    /// # Panics
    /// The reply is not that of a Redis.
    pub fn calls(&self, command: &str) -> Result<u64, Error> {
        let stats = self.command(&["INFO", "commandstats"])?;
        let text = stats.as_text().expect("INFO answers with text");
        let start = format!("cmdstat_{command}:calls=");
        let calls = text.lines().find_map(|line| line.strip_prefix(&start));
        Ok(calls.map_or(0, |rest| {
            let digits = rest.split(',').next().unwrap_or_default();
            digits.parse().expect("it counts calls")
        }))
    }

    /// Whether the process runs: it was neither killed nor stopped.
    pub(crate) fn is_running(&self) -> bool {
        self.keeper.is_some() && !is_stopped(self.pid)
    }

    /// The port that the other nodes of a Cluster use.
    pub(crate) fn port_for_nodes(&self) -> u16 {
        match self.tls_port {
            0 => self.port,
            tls_port => tls_port,
        }
    }

    /// The password of all clients, if one is set.
    pub(crate) fn password(&self) -> Option<&str> {
        self.config.password_text()
    }

    /// A connection of its own for several commands.
    pub(crate) fn connect(&self) -> Result<Connection, Error> {
        Connection::open(self.port, self.config.password_text(), COMMAND_LIMIT)
            .map_err(|error| Error::io(format!("the server at port {}", self.port), error))
    }

    fn signal(&self, signal: Signal) {
        assert!(
            self.keeper.is_some(),
            "the server was killed: restart it first"
        );
        let pid = i32::try_from(self.pid).ok().and_then(Pid::from_raw);
        let outcome = kill_process(pid.expect("a process id is a positive i32"), signal);
        outcome.expect("the server has not ended by itself: restart() starts it again");
    }

    /// One attempt on the chosen port.
    fn run(&mut self) -> Result<(), Failure> {
        let directory = self.directory.path();
        let config = self
            .config
            .write(directory, self.port, self.tls_port)
            .map_err(Failure::Other)?;
        let mut command = vec![self.program.as_os_str(), config.as_os_str()];
        if self.config.is_sentinel() {
            command.push("--sentinel".as_ref());
        }
        let with_clock = self
            .config
            .clock()
            .map(|clock| clock.environment(directory));
        if let Some(environment) = &with_clock {
            let env = ["env".as_ref()].into_iter();
            let variables = environment.iter().map(|one| one.as_os_str());
            command.splice(0..0, env.chain(variables));
        }
        let mut keeper = Keeper::start(directory, &command)
            .map_err(|error| Failure::Other(Error::io("/bin/sh cannot be started", error)))?;
        let (mut answers, mut ended) = (false, false);
        let _ = eventually(START_LIMIT, || {
            answers = self.answers_as(keeper.server_pid());
            ended = !answers && keeper.has_ended();
            answers || ended
        });
        if with_clock.is_some() {
            clock::remove_shared(keeper.server_pid());
        }
        if ended {
            return Err(self.early_end());
        }
        if !answers {
            return Err(Failure::Other(
                self.complaint("gave no reply after its start"),
            ));
        }
        self.pid = keeper.server_pid();
        self.keeper = Some(keeper);
        Ok(())
    }

    /// Whether the server on the port is the process `pid`: another server may have taken the port first.
    fn answers_as(&self, pid: u32) -> bool {
        let limit = Duration::from_secs(1);
        let info = Connection::open(self.port, self.config.password_text(), limit)
            .and_then(|mut connection| connection.command(&["INFO", "server"]));
        let Ok(info) = info else { return false };
        let line = format!("process_id:{pid}");
        info.as_text()
            .is_some_and(|text| text.lines().any(|each| each.trim_end() == line))
    }

    fn early_end(&self) -> Failure {
        let log = self.log();
        let error = self.complaint("ended at once");
        if log.contains("Address already in use") || log.contains("Failed listening on port") {
            Failure::AddressInUse(error)
        } else {
            Failure::Other(error)
        }
    }

    fn complaint(&self, what: &str) -> Error {
        let log = self.log();
        let lines: Vec<&str> = log.lines().collect();
        let tail = lines[lines.len().saturating_sub(10)..].join("\n  ");
        let program = self.program.display();
        Error::new(format!(
            "{program} on port {} {what}. Is it the server program itself? \
             The end of its log:\n  {tail}",
            self.port
        ))
    }

    fn log(&self) -> String {
        let bytes = fs::read(self.directory.path().join("server.log")).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

fn is_stopped(pid: u32) -> bool {
    state(pid).is_some_and(|state| state == 'T')
}

/// The one-letter state of a process, from /proc if there is one, else from `ps`.
fn state(pid: u32) -> Option<char> {
    if Path::new("/proc/self/stat").exists() {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The state comes after the name, which is in brackets and may contain brackets and spaces.
        return stat.rsplit(')').next()?.trim_start().chars().next();
    }
    let output = Command::new("ps")
        .args(["-o", "state=", "-p", &pid.to_string()])
        .output()
        .ok()?;
    String::from_utf8_lossy(&output.stdout)
        .trim_start()
        .chars()
        .next()
}
