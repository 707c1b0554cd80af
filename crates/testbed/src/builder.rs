//! The settings of a private server, and the redis.conf made from them. `server.rs` starts the process.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::clock::OwnClock;
use crate::provide::{Install, provide_server};
use crate::{Error, Server};

/// The longest path that fits a unix socket address on every system, without its final NUL.
const SOCKET_PATH_LIMIT: usize = 103;

/// Settings of a [`Server`]; made by [`Server::builder`].
#[derive(Clone, Default)]
#[must_use = "nothing starts before start()"]
pub struct ServerBuilder {
    directives: Vec<(String, String)>,
    password: Option<String>,
    unix_socket: bool,
    tls: Option<TlsFiles>,
    is_in_cluster: bool,
    is_sentinel: bool,
    clock: Option<OwnClock>,
}

/// The contents of the files of a server with TLS, each as PEM.
#[derive(Clone)]
pub struct TlsFiles {
    /// The server's certificate.
    pub certificate: String,
    /// The private key of `certificate`.
    pub key: String,
    /// The authorities that may issue clients' certificates.
    pub client_authorities: String,
    /// Whether a client must have a certificate.
    pub requires_client_certificates: bool,
}

/// The directives of redis.conf that name the files of [`TlsFiles::files`].
const TLS_DIRECTIVES: [&str; 3] = ["tls-cert-file", "tls-key-file", "tls-ca-cert-file"];

impl TlsFiles {
    /// The name and the text of each file.
    fn files(&self) -> [(&'static str, &str); 3] {
        [
            ("tls.crt", &self.certificate),
            ("tls.key", &self.key),
            ("tls-ca.crt", &self.client_authorities),
        ]
    }
}

impl ServerBuilder {
    /// Adds a line to redis.conf, after those of the testbed: `arg("maxmemory", "2mb")`. The value is written
    /// unchanged, so a value with blanks must have its own quotes if redis.conf needs them.
    pub fn arg(mut self, directive: impl Into<String>, value: impl Into<String>) -> Self {
        self.directives.push((directive.into(), value.into()));
        self
    }

    /// Requires this password from all clients.
    pub fn password(mut self, password: impl Into<String>) -> Self {
        self.password = Some(password.into());
        self
    }

    /// Also listens on a unix socket: see [`Server::unix_url`].
    pub fn unix_socket(mut self) -> Self {
        self.unix_socket = true;
        self
    }

    /// Also listens on another port, with TLS: see [`Server::tls_url`].
    pub fn tls(mut self, files: TlsFiles) -> Self {
        self.tls = Some(files);
        self
    }

    /// Gives the server a clock of its own. It shows the machine's time until [`Server::set_clock_offset`] is called.
    pub fn own_clock(mut self, clock: &OwnClock) -> Self {
        self.clock = Some(clock.clone());
        self
    }

    /// Makes the server a node of a Cluster, which knows no other node and serves no slot.
    pub(crate) fn in_cluster(mut self) -> Self {
        self.is_in_cluster = true;
        self
    }

    /// Makes the server a sentinel, which watches no group.
    pub(crate) fn for_sentinel(mut self) -> Self {
        self.is_sentinel = true;
        self
    }

    pub(crate) fn is_sentinel(&self) -> bool {
        self.is_sentinel
    }

    pub(crate) fn clock(&self) -> Option<&OwnClock> {
        self.clock.as_ref()
    }

    pub(crate) fn is_in_cluster(&self) -> bool {
        self.is_in_cluster
    }

    /// Starts the server and waits until it replies.
    ///
    /// # Errors
    /// The errors of [`Server::start`]. In addition: the server does not know a directive, or a directive contains a
    /// line feed.
    pub fn start(self) -> Result<Server, Error> {
        for (directive, value) in &self.directives {
            if directive.contains(['\n', '\r']) || value.contains(['\n', '\r']) {
                return Err(Error::new(format!(
                    "the directive {directive:?} {value:?} has a line feed in it: \
                     use one arg() for each line"
                )));
            }
        }
        let program = provide_server(Install::Forbidden)?;
        let directory = self.make_directory()?;
        Server::launch(program, directory, self)
    }

    fn make_directory(&self) -> Result<TempDir, Error> {
        let mut builder = tempfile::Builder::new();
        builder.prefix("leasehold-");
        let made = builder.tempdir();
        let directory =
            made.map_err(|error| Error::io("no temporary directory can be made", error))?;
        match self.socket_path(directory.path()) {
            Some(socket) if socket.as_os_str().len() > SOCKET_PATH_LIMIT => {
                let made = builder.tempdir_in("/tmp");
                made.map_err(|error| Error::io("no directory can be made in /tmp", error))
            }
            _ => Ok(directory),
        }
    }

    pub(crate) fn password_text(&self) -> Option<&str> {
        self.password.as_deref()
    }

    pub(crate) fn password_in_url(&self) -> Option<String> {
        self.password.as_deref().map(percent_encoded)
    }

    pub(crate) fn socket_path(&self, directory: &Path) -> Option<PathBuf> {
        self.unix_socket.then(|| directory.join("redis.sock"))
    }

    pub(crate) fn has_tls(&self) -> bool {
        self.tls.is_some()
    }

    /// Writes redis.conf, and the files that it names, into `directory`. Returns the path of redis.conf.
    pub(crate) fn write(
        &self,
        directory: &Path,
        port: u16,
        tls_port: u16,
    ) -> Result<PathBuf, Error> {
        let write = |path: &Path, text: &str| {
            std::fs::write(path, text)
                .map_err(|error| Error::io(format!("{} cannot be written", path.display()), error))
        };
        if let Some(tls) = &self.tls {
            for (name, text) in tls.files() {
                write(&directory.join(name), text)?;
            }
        }
        let path = directory.join("redis.conf");
        write(&path, &self.text(directory, port, tls_port))?;
        Ok(path)
    }

    fn text(&self, directory: &Path, port: u16, tls_port: u16) -> String {
        let mut lines = vec![
            "bind 127.0.0.1".to_owned(),
            format!("port {port}"),
            format!("dir {}", quoted(&directory.to_string_lossy())),
            "daemonize no".to_owned(),
            "logfile \"\"".to_owned(),
            "save \"\"".to_owned(),
            "appendonly no".to_owned(),
        ];
        if let Some(password) = &self.password {
            lines.push(format!("requirepass {}", quoted(password)));
        }
        if let Some(socket) = self.socket_path(directory) {
            lines.push(format!("unixsocket {}", quoted(&socket.to_string_lossy())));
            lines.push("unixsocketperm 700".to_owned());
        }
        if let Some(tls) = &self.tls {
            let in_directory = |name: &str| quoted(&directory.join(name).to_string_lossy());
            let auth_clients = if tls.requires_client_certificates {
                "yes"
            } else {
                "no"
            };
            lines.push(format!("tls-port {tls_port}"));
            lines.push(format!("tls-auth-clients {auth_clients}"));
            for (directive, (name, _)) in TLS_DIRECTIVES.into_iter().zip(tls.files()) {
                lines.push(format!("{directive} {}", in_directory(name)));
            }
        }
        if self.is_in_cluster {
            lines.push("cluster-enabled yes".to_owned());
            lines.push("cluster-config-file nodes.conf".to_owned());
        }
        for (directive, value) in &self.directives {
            lines.push(format!("{directive} {value}"));
        }
        lines.join("\n") + "\n"
    }
}

/// The text in quotes, as redis.conf reads it.
fn quoted(text: &str) -> String {
    let mut quoted = String::from("\"");
    for byte in text.bytes() {
        match byte {
            b'"' | b'\\' => quoted.extend(['\\', char::from(byte)]),
            b' '..=b'~' => quoted.push(char::from(byte)),
            _ => write!(quoted, "\\x{byte:02x}").expect("writing to a String cannot fail"),
        }
    }
    quoted.push('"');
    quoted
}

fn percent_encoded(text: &str) -> String {
    let mut encoded = String::new();
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            write!(encoded, "%{byte:02X}").expect("writing to a String cannot fail");
        }
    }
    encoded
}
