//! The data directories of a gateway and of an edge hold the files that the reference lists, with their modes.

use crate::world::{
    process::{GatewayProcess, causeway},
    until,
};
use std::fs;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::Path;

const PAGE: &str = include_str!("../../docs/reference/files.md");

/// Returns the names and the mode of each row in a section of the page.
fn rows(heading: &str) -> Vec<(&'static str, u32)> {
    let (_, section) = PAGE.split_once(&format!("\n## {heading}\n")).unwrap();
    let section = section.split("\n## ").next().unwrap();
    let mut found = Vec::new();
    for line in section.lines().filter(|line| line.starts_with("| `")) {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let mode = u32::from_str_radix(cells[2], 8).unwrap();
        let names = cells[1].split(", ");
        found.extend(names.map(|name| (name.trim_matches('`'), mode)));
    }
    found
}

/// Whether a name is this one, in which a word in capital letters stands for any text.
fn matches(pattern: &str, name: &str) -> bool {
    let is_capital = |c: char| c.is_ascii_uppercase();
    let Some(start) = pattern.find(is_capital) else {
        return pattern == name;
    };
    let end = pattern.rfind(is_capital).unwrap() + 1;
    name.len() > pattern.len() - (end - start)
        && name.starts_with(&pattern[..start])
        && name.ends_with(&pattern[end..])
}

/// Returns the name below `root` and the mode of each file and socket.
fn files(root: &Path) -> Vec<(String, u32)> {
    let mut found = Vec::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            // A running process may remove a file meanwhile.
            let Ok(data) = fs::metadata(&path) else {
                continue;
            };
            if data.is_dir() {
                folders.push(path);
                continue;
            }
            assert!(data.is_file() || data.file_type().is_socket());
            let name = path.strip_prefix(root).unwrap().display().to_string();
            found.push((name, data.permissions().mode() & 0o7777));
        }
    }
    found
}

async fn check(root: &Path, heading: &str, least: usize) {
    let mode = fs::metadata(root).unwrap().permissions().mode() & 0o7777;
    assert_eq!(mode, 0o700, "{}", root.display());
    let what = format!("{} has {least} files", root.display());
    until(&what, async || files(root).len() >= least).await;
    let (rows, files) = (rows(heading), files(root));
    for (name, mode) in files {
        let row = rows.iter().find(|(pattern, _)| matches(pattern, &name));
        assert_eq!(row.map(|(_, mode)| *mode), Some(mode), "{heading}: {name}");
    }
}

#[tokio::test]
async fn each_file_of_a_data_directory_is_in_the_reference() {
    let site = GatewayProcess::start().await;
    let edge = site.join("edge-1", 1).await;
    let (gateway, of_edge) = (
        "Data directory of the gateway",
        "Data directory of the edge",
    );
    check(&site.data(), gateway, 9).await;
    check(&site.edge_data("edge-1"), of_edge, 7).await;
    edge.stop().await.ok();
    let leave = causeway("edge leave").flag("--data-dir", site.edge_data("edge-1"));
    leave.run().await.ok();
    check(&site.edge_data("edge-1"), of_edge, 4).await;
    let data = site.data();
    site.gateway.signal("TERM").await;
    until("the gateway has stopped", async || {
        data.join("run-connected").exists() && !data.join("run-admin").exists()
    })
    .await;
    check(&data, gateway, 9).await;
}
