// What is known of the server: its model, and what that can do.

import { request } from "./api.js";

export const model = { id: "", chat: true, bundled: false, max_model_len: 0 };

export async function loadModel() {
  const response = await request("v1/models");
  Object.assign(model, (await response.json()).data[0]);
}
