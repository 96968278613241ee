//! Content of the hosts file: a pure function of the nodes' addresses.
//!
//! The file has an entry for every node that has an address, and no others, in order. If the entries exceed the size limit of
//! an object, there are further files. Each name belongs to one of the files by its hash alone (rendezvous hashing: the file
//! whose hash with the name is the highest). So one change is one write. A new file takes its share from all others, and no
//! other entry moves. The number of files decreases only when there is spare room. Otherwise a fleet at the limit would be
//! rewritten again and again.

use causeway_certs::NodeName;
use causeway_gateway::{
    config::{CoreDnsHosts, HostsFormat},
    state::NodeLocation,
};
use sha2::{Digest, Sha256};
use std::{collections::BTreeMap, fmt::Write, net::IpAddr};

/// Size limit of one file, in bytes. An object may have 1 MiB, and the names of its fields and metadata of other managers
/// need a part of it.
pub(super) const MAX_FILE_BYTES: usize = 900_000;

/// Format of the files.
pub(super) struct RenderOptions {
    format: HostsFormat,
    /// Zones, without leading or trailing dots.
    zones: Vec<String>,
    /// Addresses for the name of an edge's node.
    addresses: Vec<IpAddr>,
    limit: usize,
}

/// Entry of one node.
struct HostEntry {
    name: NodeName,
    lines: Vec<String>,
}

impl HostEntry {
    /// Returns the length in bytes, with line ends.
    fn len(&self) -> usize {
        self.lines.iter().map(|line| line.len() + 1).sum()
    }

    /// Returns the index of the file, among `file_count` files, that the entry belongs to.
    fn file_index(&self, file_count: usize) -> usize {
        let hash = |file: &usize| {
            let mut hash = Sha256::new();
            hash.update(u64::try_from(*file).unwrap_or_default().to_be_bytes());
            hash.update(self.name.as_str());
            hash.finalize()
        };
        (0..file_count).max_by_key(hash).unwrap_or_default()
    }
}

impl RenderOptions {
    /// Returns the options of the configuration.
    pub(super) fn new(settings: &CoreDnsHosts, addresses: Vec<IpAddr>, limit: usize) -> Self {
        let zone = |zone: &String| zone.trim_end_matches('.').to_ascii_lowercase();
        Self {
            format: settings.format,
            zones: settings.zones.iter().map(zone).collect(),
            addresses,
            limit,
        }
    }

    /// Returns all files, if there are `at_present` files now.
    pub(super) fn render_files(
        &self,
        locations: &BTreeMap<NodeName, NodeLocation>,
        at_present: usize,
    ) -> Vec<String> {
        let entries: Vec<HostEntry> = locations
            .iter()
            .map(|(name, location)| HostEntry {
                name: name.clone(),
                lines: self.render_lines(name, location),
            })
            .collect();
        let total_len: usize = entries.iter().map(HostEntry::len).sum();
        let mut count = total_len.div_ceil(self.limit).max(1);
        loop {
            let max_len = if count < at_present {
                self.limit / 4 * 3
            } else {
                self.limit
            };
            let files = Self::assign_to_files(&entries, count);
            let file_len =
                |file: &Vec<&HostEntry>| file.iter().map(|entry| entry.len()).sum::<usize>();
            if files.iter().all(|file| file_len(file) <= max_len) || count > entries.len() {
                return files.iter().map(|file| self.render_text(file)).collect();
            }
            count += 1;
        }
    }

    fn assign_to_files(entries: &[HostEntry], count: usize) -> Vec<Vec<&HostEntry>> {
        let mut files = vec![Vec::new(); count];
        for entry in entries {
            files[entry.file_index(count)].push(entry);
        }
        files
    }

    fn render_lines(&self, name: &NodeName, location: &NodeLocation) -> Vec<String> {
        let addresses = match location {
            NodeLocation::Edge(_) => &self.addresses,
            NodeLocation::Elsewhere(own) => own,
        };
        match self.format {
            HostsFormat::Causeway => {
                let mut names = name.to_string();
                for zone in &self.zones {
                    // Writing into a String cannot fail.
                    let _ = write!(names, " {name}.{zone}");
                }
                let line = |address: &IpAddr| format!("{address} {names}");
                addresses.iter().map(line).collect()
            }
            HostsFormat::OpenYurt => {
                let line = |address: &IpAddr| format!("{address}\t{name}");
                addresses.first().map(line).into_iter().collect()
            }
        }
    }

    fn render_text(&self, entries: &[&HostEntry]) -> String {
        let lines = entries.iter().flat_map(|entry| &entry.lines);
        let mut lines: Vec<&str> = lines.map(String::as_str).collect();
        match self.format {
            HostsFormat::Causeway => lines.iter().flat_map(|line| [line, "\n"]).collect(),
            HostsFormat::OpenYurt => {
                lines.sort_unstable();
                lines.join("\n")
            }
        }
    }
}

#[cfg(test)]
mod tests;
